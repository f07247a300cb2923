"""Lightning: steps and epochs into the store, and `ckpt_path="store://RUN@STEP"` out of it.

    from tensor_dedup.integrations.lightning import StoreCallback

    callback = StoreCallback("checkpoints", "run-001", every=100)
    trainer = Trainer(callbacks=[callback])
    trainer.fit(model, ckpt_path="store://run-001@200")

Works with `lightning` and `pytorch_lightning`, whichever the program has imported.
"""

from tensor_dedup.integrations.lightning.callback import StoreCallback, StoreIO

__all__ = ["StoreCallback", "StoreIO"]
