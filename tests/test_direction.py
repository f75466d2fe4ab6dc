"""Which way a metric is better, by its name."""

import pytest

from sewa_cli.direction import known_goal


@pytest.mark.parametrize(
    ("names", "goal"),
    [
        ("loss val_loss eval/wer CER ter MSE val.rmse MAE fid EER perplexity ppl log_ppl", "min"),
        ("error mean_absolute_error valLoss test-err cross_entropy bits_per_byte", "min"),
        ("negative_log_likelihood FID_score edit_distance editDistance", "min"),
        (
            "acc top1_acc accuracy token_accuracy exact_match BLEU bleu4 chrF chrF++ F1 f1_macro",
            "max",
        ),
        ("AUC roc_auc return episode_return reward success_rate rouge-L rougeL winRate", "max"),
        ("neg_mean_squared_error neg_log_loss log_likelihood pass@1", "max"),
        ("forward_distance length size score class lossless fidelity accuracy_loss f1_error", None),
    ],
)
def test_names_are_read_word_by_word(names, goal):
    assert {name: known_goal(name) for name in names.split()} == dict.fromkeys(names.split(), goal)
