"""The part of the table of seams that nobody replaces: names that are imported, read or called."""

from typing import Final

from tensor_dedup.patches.vllm.seam import RECORDED_VERSION, Seam

_LAYERS = "vllm.model_executor.layers"
_LOADERS = "vllm.model_executor.model_loader"
_RUNNER = "vllm.v1.worker"

SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        "vllm.plugins:load_plugins_by_group",
        "arguments",
        "relied on: calls our two entry points, in every process, before arguments are read",
        "(group)",
    ),
    Seam(
        "vllm.config.load:LoadConfig",
        "loader",
        "relied on: carries our configuration, beside the loader's own keys, to every process",
        needs=("load_format", "model_loader_extra_config", "device"),
    ),
    Seam(
        "vllm.config:VllmConfig",
        "loader",
        "read: where the model goes, this worker's rank, what layers entered, whether weights are "
        "written later",
        has=("device_config", "parallel_config", "compilation_config", "weight_transfer_config"),
    ),
    Seam(
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
    Seam(
        "vllm.config:ModelConfig",
        "loader",
        "read: the checkpoint's path, and the dtype of what is loaded",
        has=("model", "dtype"),
    ),
    Seam(
        "vllm.config:ModelConfig.word_embeddings_untied_by_checkpoint",
        "loader",
        "set while we compare a head with the embedding by recipe; where there is none, vLLM does "
        "not compare them",
        optional=True,
        versions=(RECORDED_VERSION,),
    ),
    Seam(
        f"{_LOADERS}.default_loader:DefaultModelLoader",
        "loader",
        "subclassed: `local_expert_ids` is set by its __init__",
        has=("Source", "counter_before_loading_weights"),
    ),
    Seam(
        f"{_LOADERS}.base_loader:BaseModelLoader.get_external_weight_memory",
        "loader",
        "overridden: what others hold of a model is no part of the engine's own memory; without "
        "it, vLLM on a GPU counts free memory only",
        "(self, vllm_config)",
        optional=True,
        versions=(RECORDED_VERSION,),
    ),
    Seam(
        "vllm.utils.mem_utils:memory_profiling",
        "profile",
        "relied on: an engine's own memory is what disappears of a GPU's free memory meanwhile, "
        "so shared weights count for the engine that made them, and for no other",
        "(baseline_snapshot, weights_memory=0)",
        optional=True,
        versions=(RECORDED_VERSION,),
    ),
    Seam(
        f"{_RUNNER}.utils:request_memory",
        "profile",
        "relied on: takes what others hold already off the engine's part of a GPU; before 0.32 it "
        "asks for nothing, and that part counts in full",
        "(init_snapshot, cache_config, external_weight_memory=0)",
        earlier=("(init_snapshot, cache_config)",),
        optional=True,
        versions=(RECORDED_VERSION,),
    ),
    Seam(
        f"{_LOADERS}.default_loader:DefaultModelLoader.track_weights_loading",
        "loader",
        "overridden: that it is called says that the model tells what it has loaded, so that "
        "what no tensor fills is missing from the checkpoint",
        needs=("model", "loaded_weights"),
    ),
    Seam(
        f"{_LOADERS}.default_loader:DefaultModelLoader.get_all_weights",
        "loader",
        "overridden: what a reload reads, from the loader of the format that was loaded",
        needs=("model_config", "model"),
    ),
    Seam(
        "vllm.config:SpeculativeConfig",
        "loader",
        "read: which model is a draft, that may take weights from its target",
        has=("draft_model_config", "target_model_config"),
    ),
    *(
        Seam(
            target,
            "loader",
            f"{how}; without it that load format is not one of those that share",
            optional=True,
            versions=(RECORDED_VERSION,),
        )
        for target, how in (
            (
                f"{_LOADERS}.sharded_state_loader:ShardedStateLoader.iterate_over_files",
                "overridden: reads the files of a saved state, deferred while a load of ours asks",
            ),
            (
                f"{_LOADERS}.sharded_state_loader:ShardedStateLoader._filter_subtensors",
                "overridden: tells tensors of one memory by address, which deferred ones lack",
            ),
            (
                f"{_LOADERS}.runai_streamer_loader:RunaiModelStreamerLoader._get_weights_iterator",
                "overridden: streams files, which in a folder we read by ourselves",
            ),
            (
                "vllm.transformers_utils.runai_utils:is_runai_obj_uri",
                "called: whether files are in a folder or in object storage",
            ),
        )
    ),
    Seam(
        f"{_LOADERS}.utils:initialize_model",
        "loader",
        "called where BaseModelLoader.create_model is missing, as its load_model does",
        "(vllm_config, *, prefix='', model_class=None, model_config=None)",
    ),
    Seam(
        f"{_LAYERS}.quantization.base_config:QuantizeMethodBase",
        "loader",
        "read: whether weights are quantised while they are loaded, which cannot be deferred",
        has=("uses_meta_device",),
    ),
    Seam(
        f"{_LAYERS}.quantization.base_config:QuantizeMethodBase.supports_pre_processed_weights",
        "loader",
        "read: whether a layer may be given weights that were processed before; where there is "
        "none, it is processed again and shared by content",
        optional=True,
        versions=(RECORDED_VERSION,),
    ),
    Seam(
        f"{_LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading",
        "loader",
        "looked at: where it does not ask for `_cpu_skip_gemm_dispatch`, `dispatch_cpu_"
        "unquantized_gemm` is wrapped, so that a reload keeps plain weights plain",
        "(self, layer)",
    ),
    *(
        Seam(target, "loader", "named: its layers are shared by key")
        for target in (
            f"{_LAYERS}.linear:UnquantizedLinearMethod",
            f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        )
    ),
    Seam(
        f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "loader",
        "named: its layers are shared by key; `moe_kernel` and `moe_quant_config` of its objects "
        "are set by its __init__",
    ),
    Seam(
        "vllm._custom_ops:CPUDNNLGEMMHandler",
        "loader",
        "recognised: what owns a packed weight; `n` and `k` of its objects are their sizes",
    ),
    Seam(
        "vllm._custom_ops:create_onednn_scaled_mm",
        "loader",
        "replaced while a layer is processed: its handler knows the scales by their address, so "
        "they are kept as long as it",
        "(weight, weight_scales, output_type, dynamic_quant, use_azp, primitive_cache_size=128)",
    ),
    Seam(
        "vllm.model_executor.kernels.linear.scaled_mm.cpu:ops.create_onednn_scaled_mm",
        "loader",
        "relied on: looks the function above up in its module whenever it calls it",
    ),
    Seam(
        "vllm._custom_ops:_supports_onednn",
        "loader",
        "read for the layer key: is there oneDNN",
    ),
    Seam(
        "vllm.platforms:current_platform",
        "loader",
        "read: may weights be packed, as on a CPU, and does this CPU do it in another way",
        has=("is_cpu", "is_zen_cpu"),
    ),
    Seam(
        "vllm.utils.torch_utils:set_default_torch_dtype",
        "loader",
        "entered, as the overridden load_model does",
        "(dtype)",
    ),
    *(
        Seam(
            f"{_RUNNER}.{module}:GPUModelRunner.get_model",
            "reload",
            "called: the model whose weights a reload is about to write",
            "(self)",
        )
        for module in ("gpu_model_runner", "gpu.model_runner")
    ),
    *(
        Seam(
            f"vllm.model_executor.{target}",
            "loader",
            "looked up: tells which quantised layers a layer key may stand for; where it is "
            "missing, they are shared by content",
            optional=True,
            versions=(RECORDED_VERSION,),
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
