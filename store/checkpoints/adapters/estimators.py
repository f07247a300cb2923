"""Estimators that boosting packages bring, with scikit-learn's interface: a class and attributes.

Only classes of the package itself: what is made from them has methods that no checkpoint has.
"""

import importlib
from typing import Any

from tensor_dedup.store.checkpoints.adapters.base import StateProvider
from tensor_dedup.store.checkpoints.adapters.rebuild import mismatched
from tensor_dedup.store.checkpoints.state_errors import DamagedStateError, UnsupportedValueError


def estimator_provider(package: str, title: str, base: str) -> StateProvider:
    """For the estimators of a package, which people call `title`.

    `base` is the class they are all made from, as "module:name". Imports nothing.
    """
    module, _, name = base.partition(":")

    def state(estimator: Any) -> dict[str, object]:
        kind = type(estimator)
        if kind.__module__.partition(".")[0] != package:
            what = f"a {kind.__qualname__}, made from {title}'s estimators"
            raise UnsupportedValueError.at("", what)
        return {"class": kind.__name__, "state": dict(vars(estimator))}

    def restore(state: Any, original: Any) -> Any:
        found = getattr(importlib.import_module(package), state["class"], None)
        every = getattr(importlib.import_module(module), name)
        if not isinstance(found, type) or not issubclass(found, every):
            raise DamagedStateError.at("", f"{title} has no estimator {state['class']!r}")
        kind: Any = found
        if original is not None and type(original) is not kind:
            article = "an" if package[0] in "aeioux" else "a"
            raise mismatched(original, f"{article} {package}.{kind.__name__}")
        estimator = kind.__new__(kind) if original is None else original
        estimator.__dict__.clear()
        estimator.__dict__.update(state["state"])
        return estimator

    return StateProvider(f"{package}.estimator", state, restore, flat=frozenset({"state"}))
