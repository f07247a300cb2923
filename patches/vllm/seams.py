"""The table of seams: every name of vLLM that this package wraps, overrides or relies on.

Each entry has the recorded signature, and the consequence if vLLM has changed it. `check` compares
the table with the installed vLLM. Before that, neither vllm nor torch is imported.
"""

import functools
import logging
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from tensor_dedup.seams import Mismatch, Seam, compare

__all__ = [
    "NEWEST_VERSION",
    "RECORDED_VERSION",
    "SEAMS",
    "WITHOUT",
    "Mismatch",
    "Part",
    "VllmSeam",
    "check",
    "compare",
    "usable",
    "why_not",
]

_log = logging.getLogger(__name__)

# The version of vLLM that this package is tested with, and all that have been tried, oldest first.
# Of the newest only the Python files were.
RECORDED_VERSION: Final = "0.32"
NEWEST_VERSION: Final = "0.33"
RECENT: Final = (RECORDED_VERSION, NEWEST_VERSION)
EVERY: Final = ("0.26", "0.28", *RECENT)

Part = Literal[
    "arguments",
    "loader",
    "reload",
    "updates",
    "sleep",
    "profile",
    "cards",
    "steps",
    "versions",
]
# What a load does without that part; one sentence, so that the log can say it.
WITHOUT: Final[dict[str, str]] = {
    "arguments": "`tensor_dedup=` loads weights plainly and `--tensor-dedup` is not offered",
    "loader": "weights are loaded plainly, without sharing",
    "reload": "weights are loaded plainly, because a reload might reach other models",
    "updates": "a weight update keeps the memory that was shared before it, as long as the model",
    "sleep": "`enable_sleep_mode` is refused together with `tensor_dedup`",
    "steps": "a running engine cannot change to another step of its run",
    "cards": "`/v1/models` does not tell which weights a model has, nor of layers from a base",
    "versions": "an engine does not tell which weights it has, and an update of them leaves "
    "entries of the old ones in its prefix cache",
    "profile": "on a GPU it may count shared weights otherwise than once",
}


@dataclass(frozen=True, slots=True)
class VllmSeam(Seam):
    """A name of vLLM that this package depends on.

    `part` is the feature of this package that needs the name. `WITHOUT[part]` says what happens if
    the feature cannot be used.
    """

    framework: ClassVar[str] = "vLLM "

    versions: tuple[str, ...] = EVERY


_ARG_UTILS = "vllm.engine.arg_utils"
_MODELS = "vllm.model_executor"
_LOADERS = "vllm.model_executor.model_loader"
_RUNNER = "vllm.v1.worker"
_CORE = "vllm.v1.engine.core"
_ENGINE_SETTINGS = (
    "model",
    "tokenizer",
    "served_model_name",
    "load_format",
    "model_loader_extra_config",
    "enable_sleep_mode",
    "enable_elastic_ep",
    "cpu_offload_gb",
    "offload_group_size",
    "weight_transfer_config",
)
_RELOAD = "(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True)"

SEAMS: Final[tuple[VllmSeam, ...]] = (
    VllmSeam(
        f"{_ARG_UTILS}:EngineArgs.__init__",
        "arguments",
        "wrapped: takes `tensor_dedup` (LLM passes it on) and refuses settings that move weights",
        needs=_ENGINE_SETTINGS,
    ),
    VllmSeam(
        f"{_ARG_UTILS}:AsyncEngineArgs.__init__",
        "arguments",
        "wrapped: a dataclass of its own generated __init__, which never calls EngineArgs'",
        needs=_ENGINE_SETTINGS,
    ),
    VllmSeam(
        f"{_ARG_UTILS}:EngineArgs.add_cli_args",
        "arguments",
        "wrapped: offers --tensor-dedup to `vllm serve` and every other command with an engine",
        "(parser)",
    ),
    VllmSeam(
        f"{_ARG_UTILS}:EngineArgs.from_cli_args",
        "arguments",
        "wrapped: it copies dataclass fields only, so the flag would be lost without a word",
        "(args)",
    ),
    VllmSeam(
        f"{_ARG_UTILS}:EngineArgs.create_engine_config",
        "arguments",
        "wrapped: a stored checkpoint without `tensor_dedup` is refused in words of ours",
        "(self, usage_context=None, headless=False)",
    ),
    VllmSeam(
        f"{_LOADERS}:register_model_loader",
        "loader",
        "called: makes `tensor_dedup` a load format (public)",
        "(load_format)",
    ),
    VllmSeam(
        f"{_LOADERS}:get_model_loader",
        "loader",
        "wrapped: a plug-in puts its own format in place of ours, and our settings would be lost; "
        "called for such a format's own loader",
        "(load_config)",
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader.__init__",
        "loader",
        "overridden: takes our settings out of those of the loader",
        "(self, load_config)",
    ),
    VllmSeam(
        f"{_LOADERS}.base_loader:BaseModelLoader.load_model",
        "loader",
        "overridden: the order of building, loading and processing is the loader's own",
        "(self, vllm_config, model_config, prefix='')",
    ),
    VllmSeam(
        f"{_LOADERS}.base_loader:BaseModelLoader.create_model",
        "loader",
        "called between the parts of load_model: builds the module tree; where it is missing, "
        "`initialize_model` is called as there",
        "(self, vllm_config, model_config, prefix='')",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader.load_weights",
        "loader",
        "overridden, and called while source tensors are deferred: filters, checks and tracks as "
        "vLLM does",
        "(self, model, model_config)",
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader._get_weights_iterator",
        "loader",
        "relied on: chooses among the iterators below, by the names of its module; overridden for "
        "stored checkpoints, which have no files",
        "(self, source)",
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader._prepare_weights",
        "loader",
        "relied on: which files hold the weights, downloaded where they are not local; "
        "overridden to note the folder",
        "(self, model_name_or_path, subfolder, revision, fall_back_to_pt, "
        "allow_patterns_overrides)",
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:safetensors_weights_iterator",
        "loader",
        "replaced: yields deferred tensors while one of our loads is under way in its thread",
        "(hf_weights_files, use_tqdm_on_load, safetensors_load_strategy=None, "
        "local_expert_ids=None, *, safetensors_prefetch_num_threads=8, "
        "safetensors_prefetch_block_size=16777216)",
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:multi_thread_safetensors_weights_iterator",
        "loader",
        "replaced: as above",
        "(hf_weights_files, use_tqdm_on_load, max_workers=4)",
    ),
    *(
        VllmSeam(
            f"{_LOADERS}.default_loader:{name}_weights_iterator",
            "loader",
            f"replaced: as above, {what}",
            signature,
            earlier=earlier,
        )
        for name, what, signature, earlier in (
            (
                "pt",
                "for files of torch.save",
                "(hf_weights_files, use_tqdm_on_load, pt_load_map_location='cpu')",
                (),
            ),
            (
                "multi_thread_pt",
                "for files of torch.save",
                "(hf_weights_files, use_tqdm_on_load, pt_load_map_location='cpu', max_workers=4)",
                (),
            ),
            (
                "np_cache",
                "for files of torch.save, not for the copies of them that vLLM makes",
                "(model_name_or_path, cache_dir, hf_folder, hf_weights_files, use_tqdm_on_load)",
                (),
            ),
            (
                "fastsafetensors",
                "where vLLM reads with a library",
                "(hf_weights_files, use_tqdm_on_load)",
                (),
            ),
            (
                "instanttensor",
                "where vLLM reads with a library",
                "(hf_weights_files, use_tqdm_on_load, local_expert_ids=None, *, "
                "load_engram_on_cpu=False)",
                (
                    "(hf_weights_files, use_tqdm_on_load, local_expert_ids=None)",
                    "(hf_weights_files, use_tqdm_on_load)",
                ),
            ),
        )
    ),
    VllmSeam(
        f"{_LOADERS}.ep_weight_filter:should_skip_weight",
        "loader",
        "called: which experts of a file belong to another rank",
        "(weight_name, local_expert_ids)",
    ),
    VllmSeam(
        f"{_LOADERS}.weight_utils:_natural_sort_key",
        "loader",
        "called: the order in which vLLM reads a checkpoint's files",
        "(filepath)",
    ),
    VllmSeam(
        f"{_LOADERS}.utils:process_weights_after_loading",
        "loader",
        "called: drives the per-layer processing that is taken over layer by layer",
        "(model, model_config, target_device)",
    ),
    VllmSeam(
        f"{_MODELS}.layers.quantization.base_config:"
        "QuantizeMethodBase.process_weights_after_loading",
        "loader",
        "shadowed by an attribute of each method during a load: a layer is shared or processed",
        "(self, layer)",
    ),
    VllmSeam(
        f"{_LOADERS}.weight_tying:maybe_retie_word_embeddings",
        "loader",
        "stood in for: it compares the bytes of weights that are not there yet",
        "(model, model_config)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_LOADERS}.weight_tying:_get_untied_lm_head",
        "loader",
        "called in its stead: which two layers it would compare and tie",
        "(model)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_MODELS}.utils:weights_already_processed",
        "loader",
        "entered on a hit: processing sets a layer up without touching its finished weights",
        "()",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_MODELS}.layers.utils:dispatch_cpu_unquantized_gemm",
        "loader",
        "wrapped: packs a weight for oneDNN; its handler is what can be shared, and over a reload "
        "what was kept plain stays plain",
        "(layer, remove_weight)",
    ),
    VllmSeam(
        f"{_MODELS}.layers.fused_moe.unquantized_fused_moe_method:"
        "UnquantizedFusedMoEMethod._init_moe_kernel",
        "loader",
        "called: a fresh kernel shows which attributes processing has set",
        "(self, layer)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_LOADERS}.reload.layerwise:initialize_layerwise_reload",
        "reload",
        "relied on: from here a reload writes weights in place, into pages of its own, because "
        "residents are mapped copy-on-write",
        "(model)",
    ),
    VllmSeam(
        f"{_LOADERS}.reload.inplace:reload_weights",
        "reload",
        "relied on: writes weights in kernel format straight into parameters, as above",
        "(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_RUNNER}.gpu_model_runner:GPUModelRunner.reload_weights",
        "reload",
        "relied on: how an engine reloads; CPUModelRunner inherits it",
        _RELOAD,
    ),
    VllmSeam(
        f"{_RUNNER}.gpu.model_runner:GPUModelRunner.reload_weights",
        "reload",
        "relied on: the same in the second generation of runners, on GPU and on CPU",
        _RELOAD,
        earlier=("(self, *args, **kwargs)",),
    ),
    *(
        VllmSeam(
            f"{_RUNNER}.gpu_worker:Worker.{name}",
            "updates",
            "wrapped: what it wrote is copied on write, and what that was before is let go then",
            signature,
            optional=True,
            versions=RECENT,
        )
        for name, signature in (
            ("update_weights", "(self, update_info)"),
            ("finish_weight_update", "(self)"),
        )
    ),
    VllmSeam(
        f"{_RUNNER}.gpu_worker:Worker.sleep",
        "sleep",
        "wrapped: shared weights, which vLLM's allocator does not know of, leave the GPU first",
        "(self, level=1)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_RUNNER}.gpu_worker:Worker.wake_up",
        "sleep",
        "wrapped: shared weights come back to their addresses first",
        "(self, tags=None)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_RUNNER}.gpu_worker:Worker.get_draft_model",
        "updates",
        "called: an update may be of a speculative model",
        "(self)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models",
        "cards",
        "wrapped: `/v1/models` tells which weights a model has, and of layers from a base",
        "(self)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.init_static_loras",
        "cards",
        "wrapped: called once when a server starts, which then has a metric of its weights",
        "(self)",
        optional=True,
        versions=RECENT,
    ),
    *(
        VllmSeam(
            f"{_CORE}:{name}",
            "versions",
            what,
            signature,
            earlier=earlier,
            optional=True,
            versions=RECENT,
        )
        for name, what, signature, earlier in (
            (
                "EngineCore._initialize_kv_caches",
                "wrapped: the model is loaded then, and its workers know which weights they have",
                "(self, vllm_config)",
                (),
            ),
            (
                "EngineCore.collective_rpc",
                "wrapped: what came from outside may have changed the weights",
                "(self, method, timeout=None, args=(), kwargs=None)",
                (),
            ),
            (
                "EngineCore.get_weight_version",
                "wrapped: answers with the digest of the weights where nobody has set a version; "
                "`_weight_version` of its objects is the answer",
                "(self)",
                (),
            ),
            (
                "EngineCore.add_request",
                "wrapped: a request that was hashed before an update is hashed again",
                "(self, request, request_wave=0)",
                (),
            ),
            (
                "get_request_block_hasher",
                "replaced: the hash of each block covers the weights, too; a request hashes what "
                "it lacks in `update_block_hashes`, and `block_hashes` are its list",
                "(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0)",
                ("(hash_block_size, caching_hash_fn)",),
            ),
        )
    ),
    VllmSeam(
        "vllm.v1.request:Request.update_block_hashes",
        "versions",
        "called after its last hashes were taken away: hashes them again",
        "(self)",
        optional=True,
        versions=RECENT,
    ),
    *(
        VllmSeam(target, "versions", how, signature, optional=True, versions=RECENT)
        for target, how, signature in (
            (
                "vllm.v1.core.sched.scheduler:Scheduler.reset_encoder_cache",
                "called after a change of the weights: outputs of encoders are of the old ones; "
                "what requests under way need is encoded again",
                "(self)",
            ),
            (
                "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
                "wrapped, of an engine with requests under way when its weights change: a request "
                "that begins again is hashed again",
                "(self, request, timestamp, drop_stale_output=False)",
            ),
            (
                "vllm.v1.executor.abstract:Executor.reset_encoder_cache",
                "called then, too: the workers hold the outputs",
                "(self)",
            ),
            (
                "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.check_and_update_cache",
                "relied on: looks outputs up in `cached` of its objects",
                "(self, request, input_id)",
            ),
        )
    ),
    *(
        VllmSeam(target, "steps", how, signature, optional=True, versions=RECENT)
        for target, how, signature in (
            (
                "vllm.entrypoints.rl.offline:RLOfflineMixin.update_weights",
                "wrapped: fetches a step, loads it and changes to it, in one call",
                "(self, request)",
            ),
            (
                "vllm.entrypoints.rl.offline:RLOfflineMixin.start_weight_update",
                "wrapped: from here on, the caller makes the calls of an update by himself",
                "(self)",
            ),
            (
                "vllm.entrypoints.rl.offline:RLOfflineMixin.finish_weight_update",
                "wrapped: until here",
                "(self, weight_version=None)",
            ),
            (
                "vllm.v1.engine.async_llm:AsyncLLM.update_weights",
                "wrapped: as above, while requests are answered",
                "(self, request)",
            ),
            (
                "vllm.v1.engine.async_llm:AsyncLLM.start_weight_update",
                "wrapped: as above",
                "(self)",
            ),
            (
                "vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update",
                "wrapped: as above",
                "(self, weight_version=None)",
            ),
            (
                "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
                "called, and wrapped: reaches the workers, which may have other weights then",
                "(self, method, timeout=None, args=(), kwargs=None)",
            ),
            (
                "vllm.distributed.weight_transfer.factory:"
                "WeightTransferEngineFactory.register_engine",
                "called: makes `tensor_dedup` a weight transfer backend (public)",
                "(name, module_path_or_cls, class_name=None)",
            ),
            (
                "vllm.distributed.weight_transfer.base:WeightTransferEngine.__init__",
                "overridden: an engine that was not loaded by this package is refused",
                "(self, config, vllm_config, device, model)",
            ),
            *(
                (
                    f"vllm.distributed.weight_transfer.base:WeightTransferEngine.{name}",
                    f"overridden: {how}",
                    signature,
                )
                for name, how, signature in (
                    ("init_transfer_engine", "there is no connection", "(self, init_info)"),
                    ("start_weight_update", "drops what was not changed to", "(self)"),
                    ("update_weights", "loads a step beside the model", "(self, update_info)"),
                    ("receive_weights", "the same", "(self, update_info)"),
                    ("finish_weight_update", "changes to the step", "(self)"),
                    ("shutdown", "drops what was not changed to", "(self)"),
                )
            ),
        )
    ),
    VllmSeam(
        "vllm.config:set_current_vllm_config",
        "steps",
        "entered while a step is loaded, as vLLM's worker does",
        "(vllm_config, check_compile=False, prefix=None)",
    ),
    # From here on: what nobody replaces, but is imported, read or called.
    VllmSeam(
        "vllm.plugins:load_plugins_by_group",
        "arguments",
        "relied on: calls our two entry points, in every process, before arguments are read",
        "(group)",
    ),
    VllmSeam(
        "vllm.config.load:LoadConfig",
        "loader",
        "relied on: carries our configuration, beside the loader's own keys, to every process",
        needs=("load_format", "model_loader_extra_config", "device"),
    ),
    VllmSeam(
        "vllm.config:VllmConfig",
        "loader",
        "read: where the model goes, this worker's rank, what layers entered, whether weights are "
        "written later",
        has=("device_config", "parallel_config", "compilation_config", "weight_transfer_config"),
    ),
    VllmSeam(
        "vllm.config:CompilationConfig",
        "loader",
        "put back as it was when a load is begun again: layers enter themselves there once",
        has=(
            "static_forward_context",
            "static_all_moe_layers",
            "enabled_custom_ops",
            "disabled_custom_ops",
        ),
    ),
    VllmSeam(
        "vllm.config:ModelConfig",
        "loader",
        "read: the checkpoint's path, the dtype of what is loaded, and whether graphs are captured",
        has=("model", "dtype", "enforce_eager"),
    ),
    VllmSeam(
        "vllm.config:ModelConfig.word_embeddings_untied_by_checkpoint",
        "loader",
        "set while we compare a head with the embedding by recipe; where there is none, vLLM does "
        "not compare them",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader",
        "loader",
        "subclassed: `local_expert_ids` is set by its __init__",
        has=("Source", "counter_before_loading_weights"),
    ),
    VllmSeam(
        f"{_LOADERS}.base_loader:BaseModelLoader.get_external_weight_memory",
        "loader",
        "overridden: what others hold of a model is no part of the engine's own memory; without "
        "it, vLLM on a GPU counts free memory only",
        "(self, vllm_config)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        "vllm.utils.mem_utils:memory_profiling",
        "profile",
        "relied on: an engine's own memory is what disappears of a GPU's free memory meanwhile, "
        "so shared weights count for the engine that made them, and for no other",
        "(baseline_snapshot, weights_memory=0)",
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_RUNNER}.utils:request_memory",
        "profile",
        "relied on: takes what others hold already off the engine's part of a GPU; before 0.32 it "
        "asks for nothing, and that part counts in full",
        "(init_snapshot, cache_config, external_weight_memory=0)",
        earlier=("(init_snapshot, cache_config)",),
        optional=True,
        versions=RECENT,
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader.track_weights_loading",
        "loader",
        "overridden: that it is called says that the model tells what it has loaded, so that "
        "what no tensor fills is missing from the checkpoint",
        "(self, model, loaded_weights, quantized=False)",
        earlier=("(self, model, loaded_weights)",),
    ),
    VllmSeam(
        f"{_LOADERS}.default_loader:DefaultModelLoader.get_all_weights",
        "loader",
        "overridden: what a reload reads, from the loader of the format that was loaded",
        "(self, model_config, model)",
    ),
    VllmSeam(
        "vllm.config:SpeculativeConfig",
        "loader",
        "read: which model is a draft, that may take weights from its target",
        has=("draft_model_config", "target_model_config"),
    ),
    *(
        VllmSeam(
            target,
            "loader",
            f"{how}; without it that load format is not one of those that share",
            signature,
            earlier=earlier,
            optional=True,
            versions=RECENT,
        )
        for target, how, signature, earlier in (
            (
                f"{_LOADERS}.sharded_state_loader:ShardedStateLoader.iterate_over_files",
                "overridden: reads the files of a saved state, deferred while a load of ours asks",
                "(self, paths)",
                (),
            ),
            (
                f"{_LOADERS}.sharded_state_loader:ShardedStateLoader._filter_subtensors",
                "overridden: tells tensors of one memory by address, which deferred ones lack",
                "(tensors)",
                (),
            ),
            (
                f"{_LOADERS}.runai_streamer_loader:RunaiModelStreamerLoader._get_weights_iterator",
                "overridden: streams files, which in a folder we read by ourselves",
                "(self, model_or_path, revision, is_unused_weight=None)",
                ("(self, model_or_path, revision)",),
            ),
            (
                "vllm.transformers_utils.runai_utils:is_runai_obj_uri",
                "called: whether files are in a folder or in object storage",
                "(model_or_path)",
                (),
            ),
        )
    ),
    VllmSeam(
        f"{_LOADERS}.utils:initialize_model",
        "loader",
        "called where BaseModelLoader.create_model is missing, as its load_model does",
        "(vllm_config, *, prefix='', model_class=None, model_config=None)",
    ),
    VllmSeam(
        f"{_MODELS}.layers.quantization.base_config:QuantizeMethodBase",
        "loader",
        "read: whether weights are quantised while they are loaded, which cannot be deferred",
        has=("uses_meta_device",),
    ),
    VllmSeam(
        f"{_MODELS}.layers.quantization.base_config:QuantizeMethodBase.supports_pre_processed_weights",
        "loader",
        "read: whether a layer may be given weights that were processed before; where there is "
        "none, it is processed again and shared by content",
        optional=True,
        versions=RECENT,
    ),
    *(
        VllmSeam(target, "loader", "named: its layers are shared by key")
        for target in (
            f"{_MODELS}.layers.linear:UnquantizedLinearMethod",
            f"{_MODELS}.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        )
    ),
    VllmSeam(
        f"{_MODELS}.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "loader",
        "named: its layers are shared by key; `moe_kernel` and `moe_quant_config` of its objects "
        "are set by its __init__",
    ),
    VllmSeam(
        "vllm._custom_ops:CPUDNNLGEMMHandler",
        "loader",
        "recognised: what owns a packed weight; `n` and `k` of its objects are their sizes",
    ),
    VllmSeam(
        "vllm._custom_ops:create_onednn_scaled_mm",
        "loader",
        "replaced while a layer is processed: its handler knows the scales by their address, so "
        "they are kept as long as it",
        "(weight, weight_scales, output_type, dynamic_quant, use_azp, primitive_cache_size=128)",
    ),
    VllmSeam(
        "vllm.model_executor.kernels.linear.scaled_mm.cpu:ops.create_onednn_scaled_mm",
        "loader",
        "relied on: looks the function above up in its module whenever it calls it",
    ),
    VllmSeam(
        "vllm._custom_ops:_supports_onednn",
        "loader",
        "read for the layer key: is there oneDNN",
    ),
    VllmSeam(
        "vllm.platforms:current_platform",
        "loader",
        "read: may weights be packed, as on a CPU, and does this CPU do it in another way",
        has=("is_cpu", "is_zen_cpu"),
    ),
    *(
        VllmSeam(
            f"{module}:default_weight_loader",
            "loader",
            "read for the key of a load plan: the function that loads most parameters",
            "(param, loaded_weight)",
        )
        for module in (f"{_LOADERS}.weight_utils", "vllm.model_executor.models.utils")
    ),
    *(
        VllmSeam(
            f"vllm.distributed.parallel_state:{name}",
            "loader",
            "called for the key of a load plan: this process's rank in the group, and its size",
            "()",
        )
        for name in ("get_tp_group", "get_pp_group", "get_dp_group")
    ),
    VllmSeam(
        "vllm.utils.torch_utils:set_default_torch_dtype",
        "loader",
        "entered, as the overridden load_model does",
        "(dtype)",
    ),
    *(
        VllmSeam(
            f"{_RUNNER}.{module}:GPUModelRunner.get_model",
            "reload",
            "called: the model whose weights a reload is about to write",
            "(self)",
        )
        for module in ("gpu_model_runner", "gpu.model_runner")
    ),
    *(
        VllmSeam(
            f"vllm.model_executor.{target}",
            "loader",
            "looked up: tells which quantised layers a layer key may stand for; where it is "
            "missing, they are shared by content",
            optional=True,
            versions=RECENT,
        )
        for target in (
            "kernels.linear.base:MMLinearKernel",
            "kernels.linear.mixed_precision.MPLinearKernel:MPLinearKernel",
            "kernels.linear.scaled_mm.ScaledMMLinearKernel:ScaledMMLinearKernel",
            "kernels.linear.scaled_mm.cpu:CPUInt8ScaledMMLinearKernel",
            "kernels.linear.scaled_mm.pytorch:PerTensorTorchFP8ScaledMMLinearKernel",
            "layers.quantization.compressed_tensors.compressed_tensors:"
            "CompressedTensorsLinearMethod",
            "layers.quantization.compressed_tensors.schemes:CompressedTensorsW8A8Int8",
            "layers.quantization.fp8:Fp8LinearMethod",
        )
    ),
)


def check(*parts: Part) -> tuple[Mismatch, ...]:
    """Compare the installed vLLM with the table `SEAMS`, and return the mismatches.

    `SEAMS` lists the names of vLLM that each feature of this package needs. Only the names for the
    features in `parts` are compared, or all names if no `parts` are given. The modules that have
    the names are imported. A missing module or name is a mismatch, not an error.
    """
    chosen = (seam for seam in SEAMS if not parts or seam.part in parts)
    return tuple(found for seam in chosen if (found := compare(seam)) is not None)


@functools.cache
def why_not(*parts: Part) -> str | None:
    """Return why the features in `parts` do not work with the installed vLLM. Thread-safe.

    The result is None if all of them work.
    """
    return _reason(*parts)


@functools.cache
def usable(part: Part) -> bool:
    """Return whether the feature `part` works with the installed vLLM. Thread-safe.

    If the feature does not work, the reason is logged once in each process.
    """
    reason = _reason(part)
    if reason is not None:
        _log.warning("%s", reason)
    return reason is None


def _reason(*parts: Part) -> str | None:
    mismatches = check(*parts)
    if not mismatches:
        return None
    return (
        f"this vLLM is not the one tensor-dedup knows, so {WITHOUT[mismatches[0].seam.part]}: "
        f"{'; '.join(map(str, mismatches))}"
    )
