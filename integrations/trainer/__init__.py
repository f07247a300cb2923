"""Transformers' Trainer: every step or epoch into the store.

from tensor_dedup.integrations.trainer import StoreCallback

callback = StoreCallback("checkpoints", "run-001", every=100)
trainer = Trainer(..., callbacks=[callback])
trainer.train()
trainer.train(resume_from_checkpoint=callback.check_out(folder))
"""

from tensor_dedup.integrations.trainer.callback import StoreCallback

__all__ = ["StoreCallback"]
