"""Callbacks for your training script: save what `sewa select` needs, whole or not at all.

    from sewa_cli.callbacks import IntervalMean, save_weights    # a plain loop
    from sewa_cli.callbacks.huggingface import SaveForSewa       # transformers.Trainer
    from sewa_cli.callbacks.lightning import SaveForSewa         # lightning.Trainer

None of the three imports what another needs.
"""

from sewa_cli.callbacks.means import IntervalMean
from sewa_cli.callbacks.saving import save_weights

__all__ = ["IntervalMean", "save_weights"]
