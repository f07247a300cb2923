"""A KV connector that keeps the blocks of prompts in files, as vLLM's own example does.

The example names a prompt by its tokens, and this one by the hash of its last full block, which
most connectors go by.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector as example

BY_TOKENS, BY_HASHES = "ExampleConnector", "ByHashes"


def settings(connector: str, folder: str) -> dict[str, Any]:
    """Arguments of an engine that uses a connector, with its files in a folder."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_module_path=__name__ if connector == BY_HASHES else None,
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    return {"kv_transfer_config": config}


class ByHashes(example.ExampleConnector):
    """vLLM's example, but for the names of files."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._names: dict[str, list[str]] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._names[request.request_id] = [request.block_hashes[-1].hex()]
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _found_match_for_request(self, request: Any) -> bool:
        name = self._names[request.request_id]
        return self._found_match_for_prompt(list(request.prompt_token_ids), name)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        found = example.ExampleConnectorMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            name, tokens = self._names[new.req_id], new.prompt_token_ids
            loads = self._requests_need_load.pop(new.req_id, None) is not None
            if loads or not self._found_match_for_prompt(tokens, name):
                found.add_request(tokens, new.block_ids[0], self._block_size, not loads, name)
        return found
