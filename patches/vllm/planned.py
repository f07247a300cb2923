"""Load plans in vLLM: whether a load may have one, and how one is used and made.

A load plan (`tensor_dedup.loader.deferred.load_plan`) has the outcome of a load whose parameters
all became shared. It is used for ordinary loads into host memory only: one default loader, one
checkpoint, nothing quantised and nothing written later. Every other load is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import nn
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.models import utils as model_utils

from tensor_dedup.errors import TensorDedupError
from tensor_dedup.loader.deferred.layer_key import process_text
from tensor_dedup.loader.deferred.load_plan import (
    PLANS,
    Head,
    HeldPlan,
    LoadPlan,
    ModuleStates,
    UndescribedError,
    described,
    plan_of,
)
from tensor_dedup.loader.deferred.recipe import uses_initial
from tensor_dedup.loader.residents.resident import Resident
from tensor_dedup.patches.vllm import weight_iterators
from tensor_dedup.patches.vllm.kernels import dispatch
from tensor_dedup.patches.vllm.load_formats import is_written_later

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.sources import Placed, SourceTensor
    from tensor_dedup.loader.deferred.layer_records import LayerRecord
    from tensor_dedup.loader.deferred.parameters import DeferredParameter

Named = tuple[str, "SourceTensor", "Placed | None"]
Weights = Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
OpenNamed = Callable[[list[str], Callable[[str], bool]], Iterator[Named]]

# Of the configuration: a number drawn for each engine; the layers of the model, which the head
# describes by themselves; and how often each operation was built, which is less where a module is
# an earlier model's.
_EXEMPT = {
    "": ("instance_id",),
    "compilation_config": (
        "static_forward_context",
        "static_all_moe_layers",
        "enabled_custom_ops",
        "disabled_custom_ops",
    ),
}


@dataclass(slots=True)
class LoadInputs:
    """What a load depends on beside its checkpoint, and whether it may have a plan."""

    config: TensorDedupConfig
    vllm_config: VllmConfig
    model_config: ModelConfig

    def plannable(self, model: nn.Module) -> bool:
        """Return whether a load of `model` may have a plan, if it is into host memory.

        It may not if other memory than the checkpoint's decides what is loaded, if weights are
        written after the load, or if every tensor is to be compared.
        """
        config, own, whole = self.config, self.model_config, self.vllm_config
        parallel = whole.parallel_config
        refused = (
            config.memory_manager is not None,
            config.frozen_base is not None,
            config.verifies_bytes,
            config.audit > 0,
            own is not whole.model_config,  # a draft, or a part of another model
            own.quantization is not None,
            whole.quant_config is not None,
            whole.lora_config is not None,
            whole.speculative_config is not None,
            is_written_later(whole),
            bool(parallel.enable_expert_parallel),
            bool(parallel.enable_eplb),
            self.untied(),
            bool(getattr(getattr(own, "multimodal_config", None), "mm_encoder_only", False)),
            bool(getattr(model, "secondary_weights", ())),
        )
        return not any(refused)

    def untied(self) -> bool:
        """Return whether vLLM looks for a head that equals the embeddings after the load."""
        return bool(getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False))

    def described(self) -> list[Any]:
        """Return the configuration of the engine and of this package, as plain values.

        Raises:
            UndescribedError: There is an object in it that cannot be described.
        """
        whole = dict(vars(self.vllm_config))
        for part, names in _EXEMPT.items():
            inside = dict(vars(whole[part])) if part else whole
            for name in names:
                inside.pop(name, None)
            if part:
                whole[part] = inside
        return [described(whole), described(self.config), _ranks()]


def _ranks() -> list[tuple[int, int]]:
    """Return this process's rank and the size of each of its groups."""
    found = []
    for group in (get_tp_group, get_pp_group, get_dp_group):
        try:
            here = group()
        except AssertionError:  # there is no such group
            continue
        found.append((here.rank_in_group, here.world_size))
    return found


@dataclass(slots=True)
class Planning:
    """The part of one load that has to do with plans: finding one, or making one of the outcome.

    `ruled_out` is set as soon as the load turns out to do what no plan can repeat.
    """

    inputs: LoadInputs
    head: Head
    configuration: list[Any]
    ruled_out: bool = False
    _states: ModuleStates | None = None
    _wanted: list[str] = field(default_factory=list)  # names of parameters
    _used: set[int] = field(default_factory=set)  # source tensors, by `id`

    @classmethod
    def of(cls, inputs: LoadInputs, model: nn.Module) -> Planning | None:
        """Return the planning of a load into `model`, which was just built, or None: no plan."""
        if not inputs.plannable(model):
            return None
        state = [process_text(), vllm.__version__, dispatch()]
        try:
            configuration = inputs.described()
            places = (weight_utils, model_utils)
            loaders = [getattr(each, "default_weight_loader", None) for each in places]
            return cls(inputs, Head.of(model, configuration, state, code=loaders), configuration)
        except UndescribedError:
            return None

    def find(
        self, model: nn.Module, weights: Weights, named: OpenNamed
    ) -> tuple[HeldPlan, list[Named]] | None:
        """Return the plan for this load and its source tensors, or None if there is none.

        `weights(model)` is vLLM's iterator of the checkpoint's tensors, and `named(paths, wanted)`
        opens files and yields those of their source tensors that are wanted. Nothing is read.
        """
        if not PLANS.has_head(self.head.digest):
            return None
        found: list[Named] = []

        def note(paths: list[str], wanted: Callable[[str], bool]) -> Iterator[Any]:
            found.extend(named(paths, wanted))
            return iter(())

        try:
            with weight_iterators.deferring(note):
                for _ in weights(model):
                    return None  # of an iterator that we know nothing of
        except (TensorDedupError, OSError, RuntimeError, ValueError, TypeError, LookupError):
            return None  # met again on the ordinary way, which says it
        held = PLANS.find(self.head.with_contents(found))
        return None if held is None else (held, found)

    def before_loading(self, model: nn.Module) -> None:
        """Note what the modules hold, just before the loading code runs."""
        self._states = ModuleStates(model)

    def after_loading(self, model: nn.Module) -> None:
        """Rule a plan out if the loading code has changed anything but the parameters."""
        assert self._states is not None
        changed = not self._states.unchanged(model) or self.inputs.untied()
        self._states = None
        try:
            self.ruled_out |= changed or self.inputs.described() != self.configuration
        except UndescribedError:
            self.ruled_out = True

    def expect(self, model: nn.Module, deferred: dict[int, DeferredParameter]) -> None:
        """Note the parameters that a plan must account for, after tracing."""
        # Not the parameters themselves, whose deferred tensors must be gone when the load ends.
        self._wanted = [each.name for each in deferred.values()]
        self._used = {id(source) for each in deferred.values() for source in each.sources}
        self.ruled_out |= any(id(each) not in deferred for each in model.parameters())
        views = [each.view for each in deferred.values()]
        # What a constructor leaves need not be the same in every model.
        self.ruled_out |= any(view is None or uses_initial(view) for view in views)

    def outcome(
        self,
        model: nn.Module,
        residents: dict[str, Any],
        layers: dict[int, LayerRecord],
        sources: list[Named],
    ) -> LoadPlan | None:
        """Return the plan of a load that has ended, or None if it can have none.

        `residents` are the residents by the names of the parameters that are mappings of them,
        `layers` are the records by the `id` of the layers that use them, and `sources` are the
        source tensors in the order in which they were loaded.
        """
        names = {id(module): name for name, module in model.named_modules()}
        records = {names[key]: record for key, record in layers.items() if key in names}
        for name in self._wanted:
            self.ruled_out |= name not in residents and name.rpartition(".")[0] not in records
        self.ruled_out |= any(not isinstance(each, Resident) for each in residents.values())
        places = [n for n, (_, source, _) in enumerate(sources) if id(source) in self._used]
        self.ruled_out |= any(sources[place][1].digest is None for place in places)
        # What was used of a part alone has no digest here, and then the key would not tell it.
        self.ruled_out |= not self._used <= {id(source) for _, source, _ in sources}
        if self.ruled_out:
            return None
        key = self.head.with_contents(sources)
        return plan_of(self.head, key, residents, records, places)
