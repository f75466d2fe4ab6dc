"""Metrics of what a language model generates: BLEU, chrF, word and character error rates.

A part is a prompt and what should follow. Its scores are what it adds to the sums that a metric of
a whole corpus is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.errors import ConfigError
from sewa_cli.task.ready import import_library
from sewa_cli.task.ready.folder import Source
from sewa_cli.task.ready.speech import features_of
from sewa_cli.text import few

Sentence = tuple[int, Any, str]  # its number, as a sentence may come twice; prompt and reference
USUAL_TOKENS = 128


class Generation:
    """Generates with a model and compares with references.

    options    settings of `generate`, over those of generation_config.json
    extractor  the prompts are recordings, which it makes features of
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Any,
        options: Mapping[str, Any],
        bleu: Mapping[str, Any],
        chrf: Mapping[str, Any],
        extractor: Any = None,
    ) -> None:
        metrics = import_library("args.generate", "sacrebleu").metrics
        self._by_sacrebleu = {"bleu": metrics.BLEU(**bleu), "chrf": metrics.CHRF(**chrf)}
        self._jiwer = import_library("args.generate", "jiwer")
        self._tokenizer, self._options = tokenizer, options
        self._extractor, self._config = extractor, source.generation()
        if unknown := source.transformers.GenerationConfig().update(**options):
            raise ConfigError(f"args.generate: generate() has no {few([*unknown])}; leave it out")

    def functions(
        self, prompts: Mapping[Any, Sequence[Any]], references: Mapping[Any, Sequence[str]]
    ) -> dict[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {"scores": self.scores, "corpus": self.corpus}
        for name, part in (("score_parts", "selection"), ("heldout_parts", "heldout")):
            if part in prompts:
                pairs = zip(prompts[part], references[part], strict=True)
                sentences = [(number, *pair) for number, pair in enumerate(pairs)]
                found[name] = partial(list, sentences)
        return found

    @torch.inference_mode()
    def scores(self, model: nn.Module, parts: Sequence[Sentence]) -> list[dict[str, Any]]:
        answers = self.answers(model, [prompt for _, prompt, _ in parts])
        pairs = zip(answers, parts, strict=True)
        return [self._compared(answer, reference) for answer, (_, _, reference) in pairs]

    def answers(self, model: Any, prompts: Sequence[Any]) -> list[str]:
        tokenizer, is_causal = self._tokenizer, not model.config.is_encoder_decoder
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        inputs = self._encode(prompts, "left" if is_causal else "right")
        inputs = {key: x.to(model.device) for key, x in inputs.items()}
        config = deepcopy(self._config or model.generation_config)
        config.update(use_cache=True, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        if config.max_length in (None, 20):  # nobody has chosen one
            config.update(max_new_tokens=config.max_new_tokens or USUAL_TOKENS, max_length=None)
        config.update(**self._options)
        found = model.generate(**inputs, generation_config=config)
        start = inputs["input_ids"].shape[1] if is_causal else 0
        texts = tokenizer.batch_decode(found[:, start:], skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _encode(self, prompts: Sequence[Any], side: str) -> dict[str, Tensor]:
        if self._extractor is not None:
            return {"input_features": features_of(self._extractor, prompts)}
        options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
        encoded = self._tokenizer([*prompts], **options)
        return {key: encoded[key] for key in ("input_ids", "attention_mask")}

    def corpus(self, name: str, sums: Sequence[float]) -> float:
        if name in self._by_sacrebleu:
            counts = [round(number) for number in sums]
            found: float = self._by_sacrebleu[name]._aggregate_and_compute([counts]).score
            return found
        errors, length = sums
        return errors / length if length else float(errors > 0)

    def _compared(self, answer: str, reference: str) -> dict[str, Any]:
        words = self._jiwer.process_words(reference, answer)
        letters = self._jiwer.process_characters(reference, answer)
        return {
            name: metric._extract_corpus_statistics([answer], [[reference]])[0]
            for name, metric in self._by_sacrebleu.items()
        } | {
            "wer": _errors(words),
            "cer": _errors(letters),
            "exact_match": float(answer == reference),
        }


def _errors(found: Any) -> tuple[int, int]:
    """Return the number of errors, and that of the reference's words or characters."""
    missed = found.substitutions + found.deletions
    return missed + found.insertions, missed + found.hits
