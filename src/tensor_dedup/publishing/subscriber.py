"""Follow a run that is published elsewhere: bring its steps here as they appear."""

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.errors import ConfigError
from tensor_dedup.remote import on_demand
from tensor_dedup.settings import remote_url
from tensor_dedup.store.format.names import run_of_latest
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.store.store import LocalStore
from tensor_dedup.types import STORE_SCHEME


def fetch_step(config: TensorDedupConfig, url: str) -> str:
    """Pull the step `url` into the store of `config`, and return its URL, `store://RUN@STEP`.

    `url` is `store://RUN@STEP` or `store://RUN@latest`, the step that was saved last. The remote is
    that of `config`, or else that of the environment or a configuration file. Only what the store
    lacks of the step travels. Without a remote, the step must be in the store.

    While this process runs, nothing that follows the run deletes the last two steps of the run that
    the process has fetched. Other errors are those of `on_demand.fetch_step`.

    Raises:
        ConfigError: `url` names no step.
        StoreError: The step cannot be had. It was not replaced by another one.
    """
    name = url.removeprefix(STORE_SCHEME)
    step = parse_step_name(name)
    run = run_of_latest(name) if step is None else step.run
    if run is None or not url.startswith(STORE_SCHEME) or (step is not None and step.kept):
        what = f"{url!r} names no step of a run; write {STORE_SCHEME}RUN@STEP or "
        raise ConfigError(f"{what}{STORE_SCHEME}RUN@latest", url=url)
    there = remote_url(config.remote)
    store = LocalStore.open(config.store_folder, create=there is not None)
    number = None if step is None else step.step
    return STORE_SCHEME + on_demand.fetch_step(store, there, run, number)
