"""The errors of publishing a run, and of engines that are asked over HTTP to load a step.

StoreError
  RunInUseError             another process publishes the run from the same store
  OtherVersionsError        the place has slime's versions of another run
  EngineUrlError            the URL cannot be that of an engine's server
  EngineError               an engine did not load a step, or does not say which it runs
    EngineUnreachableError    its server does not answer
    OtherWeightsError         it may run something else than it loaded last
"""

from tensor_dedup.errors import NOBODY_THERE, WRONG_USE
from tensor_dedup.store.errors import AdvisedError


class RunInUseError(AdvisedError):
    """Another process publishes the run from the same store.

    `facts` has its `pid` and its `host`, or None where they are not known.
    """

    exit_status = WRONG_USE
    advice = "end it, or call its Publisher's close; for a run of its own, give another `run=`"


class OtherVersionsError(AdvisedError):
    """The place has versions in slime's format already, which are those of another run."""

    exit_status = WRONG_USE
    advice = "publish the run to another place, which it has for itself"


class EngineUrlError(AdvisedError):
    """The URL cannot be that of an engine's server."""

    exit_status = WRONG_USE
    advice = "write http://HOST:PORT, as of `vllm serve`"


class EngineError(AdvisedError):
    """An engine did not load a step, and runs the one before, or does not say which it runs."""

    advice = "see the log of the engine"


class EngineUnreachableError(EngineError):
    """The server of an engine does not answer."""

    exit_status = NOBODY_THERE
    advice = "check the URL, and whether the server runs"


class OtherWeightsError(EngineError):
    """An engine may run something else than it was asked to load last."""

    advice = "unless it was started anew, let a single `follow` be all that updates it"
