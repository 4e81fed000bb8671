"""kvgen's products over 4-bit and 8-bit weights inside vLLM: `--quantization kvgen`, of 16-bit checkpoints, which are packed when they are
loaded, and of GPTQ, AWQ and compressed-tensors.

vLLM loads each rank's part of a weight, in the checkpoint's layout, and `process_weights_after_loading` packs it. Layers that vLLM merges
(q, k and v; gate and up) are one product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import routed_experts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
)
from vllm.platforms import current_platform

from kvgen.digest import digest
from kvgen.errors import UnsupportedError
from kvgen.format.dtypes import torch_dtype
from kvgen.format.weights import Clip
from kvgen.integrations.linears import Product, linear_spec
from kvgen.integrations.vllm.formats import refused, refusing
from kvgen.integrations.weights import Weight, awq, compressed, gptq, in_kernel_groups, kernel_group, method_of
from kvgen.spec import LinearSpec

NAME = "kvgen"
FIELD = "kvgen_weights"
"""Of `additional_config`."""
TENSORS = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
}
"""Of a layer in a checkpoint, by its method: codes, scales, zeros, and what is not kept."""
_workers = ThreadPoolExecutor(8, thread_name_prefix="kvgen-fetch")


@dataclass(frozen=True)
class Form:
    """How the weights of a layer are stored: fields of `linear` in a spec."""

    bits: int = 4
    group: int | Literal["row"] = 128
    zero: bool = False


@dataclass(frozen=True)
class Options:
    """What `additional_config` says of weights."""

    form: Form
    head: Form | None
    """Of the output head, which keeps its 16 bits by default."""
    skip: tuple[str, ...]
    """Expressions of names of layers that keep 16 bits."""
    clip: Clip


def options_of(config: Any) -> Options:
    """Raises UnsupportedError where they are none."""
    given = (config.additional_config or {}).get(FIELD) if isinstance(config.additional_config, Mapping) else None
    try:
        form = dict(given or {})
        head, skip, clip = form.pop("head", None), form.pop("skip", []), form.pop("clip", "none")
        if isinstance(skip, str):
            raise TypeError("skip is a list of expressions")
        return Options(Form(**form), None if head is None else Form(**{"bits": 8, **head}), tuple(skip), clip)
    except (TypeError, ValueError) as error:
        raise refused(f"{FIELD} of --additional-config", str(error).removeprefix("Form.__init__() ")) from None


@cache
def product(spec: LinearSpec) -> Future[Product]:
    """The product of a spec, which is compiled and verified beside the loading of weights. A compiled graph, which vLLM keeps for other
    processes, knows it by its spec.
    """
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else -1  # a thread's own is the first, until it is told; -1: none

    def made() -> Product:
        with torch.cuda.device(gpu):
            return Product(spec, name=digest(spec.to_json()))

    return _workers.submit(made)


class KvgenWeights(QuantizationConfig):
    """What vLLM asks of a quantization: which layers have it, and how."""

    def __init__(self, quantization: Mapping[str, Any] | None = None) -> None:
        """`quantization` is the checkpoint's. Raises UnsupportedError for one that kvgen does not read."""
        super().__init__()
        self.method, self.v2 = method_of(quantization)
        self.codes, self.scales, self.zeros, *self.rest = TENSORS[self.method or "gptq"]
        self.symmetric = bool((quantization or {}).get("sym", True))
        self.shapes: dict[str, list[int]] = {}
        """Of the tensors of a quantized checkpoint, by their names in vLLM."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KvgenWeights:
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> str | None:
        """kvgen serves other methods' checkpoints where the user asks for it."""
        return NAME if user_quant == NAME else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Nothing is dropped: `g_idx` is checked."""
        return WeightsMapper()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        if self.method is not None:
            found = get_safetensors_params_metadata(model_name, revision=revision)
            self.shapes = {name: list(about["shape"]) for name, about in found.items() if "shape" in about}  # not "__metadata__"
            if not any(name.endswith("." + self.codes) for name in self.shapes):
                raise refused("--quantization kvgen", f"{model_name} is {self.method}, and has no safetensors with {self.codes}")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.shapes = hf_to_vllm_mapper.apply_dict(self.shapes)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """How vLLM's layer of this name computes; None for what stays as it is. Raises UnsupportedError for what kvgen cannot compute."""
        head, experts = isinstance(layer, ParallelLMHead), isinstance(layer, routed_experts.RoutedExperts)
        if not (head or experts or isinstance(layer, LinearBase)):
            return None  # attention asks again when weights are reloaded, where older vLLMs have no current configuration
        options = options_of(get_current_vllm_config())
        skipped = any(re.search(pattern, prefix) for pattern in options.skip)
        if experts:
            if not skipped:
                raise refused(prefix, f"kernels multiply by one matrix, not by those of experts: leave 16 bits by {FIELD}.skip")
            return None
        if self.method is not None:
            form = self._stored_form(prefix, layer.embedding_dim if head else layer.input_size)
            if form is not None and (head or skipped or options.form != Form()):
                told = "an output head that the checkpoint quantizes" if head else "its bits, group, zero and layers are the checkpoint's"
                raise refused(prefix, f"{told} ({self.method})")
            if form is not None:
                return KvgenLinearMethod(prefix, form, options.clip, self)
        elif not head and not skipped:
            return KvgenLinearMethod(prefix, options.form, options.clip)
        if head and options.head is not None:
            return KvgenLinearMethod(prefix, options.head, options.clip)
        return None if head else UnquantizedLinearMethod()

    def _stored_form(self, prefix: str, k: int) -> Form | None:
        """How the checkpoint stores a layer of `k` channels, or the layers that vLLM merges into it; None for 16 bits.

        Raises UnsupportedError where these differ.
        """
        owner, _, child = prefix.rpartition(".")
        parts = [prefix]
        if f"{prefix}.{self.codes}" not in self.shapes:
            parts = [f"{owner}.{part}" if owner else part for part in self.packed_modules_mapping.get(child, [child])]
        forms = {self._form(part, k) for part in parts}
        if len(forms) > 1:
            raise refused(prefix, f"vLLM computes {', '.join(parts)} as one layer, and the checkpoint stores them in different formats")
        return forms.pop()

    def _form(self, name: str, k: int) -> Form | None:
        codes, scales, zeros = (self.shapes.get(f"{name}.{tensor}") for tensor in (self.codes, self.scales, self.zeros))
        if codes is None or scales is None:
            return None
        along = 1 if self.method == "compressed-tensors" else 0  # the axis of channels
        groups = scales[along] if len(scales) > along else 1
        bits = 4 if self.method == "awq" else 32 * codes[along] // k
        return Form(bits, "row" if groups == 1 else k // groups, not self.symmetric if self.method == "gptq" else zeros is not None)


@register_weight_loader_v2_supported_method
class KvgenLinearMethod(LinearMethodBase):
    """One layer of vLLM: a product over the packed weights of this rank."""

    def __init__(self, name: str, form: Form, clip: Clip, stored: KvgenWeights | None = None) -> None:
        """`stored` is the checkpoint's quantization, None where it has 16 bits."""
        self.name, self.form, self.clip, self.stored = name, form, clip, stored

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        n, k = sum(output_partition_sizes), input_size_per_partition
        what = f"{self.name}, [{n}, {k}] of a rank" if (n, k) != (output_size, input_size) else f"{self.name}, [{n}, {k}]"
        fields = {**asdict(self.form), "n": n, "k": k, "dtype": str(params_dtype).removeprefix("torch.")}
        if self.stored is not None:
            if self.form.group != "row" and k % self.form.group:
                raise refused(what, f"the checkpoint has groups of {self.form.group} channels, and ranks would share one")
            fields["group"] = kernel_group(what, self.form.group)
        with refusing(what):
            self.spec = linear_spec(self.name, torch.device(current_platform.device_type), fields)
        product(self.spec)
        loader = extra["weight_loader"]
        if self.stored is None:
            weight = torch.full((n, k), torch.nan, dtype=params_dtype)  # what is not loaded is refused when it is quantized
            layer.register_parameter("weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader))
        else:
            self._create_stored(layer, self.stored, params_dtype, loader)

    def _create_stored(self, layer: Any, stored: KvgenWeights, dtype: torch.dtype, loader: Any) -> None:
        """The tensors of the checkpoint's layout. A group that is a whole row is not divided among ranks."""
        n, k, per, rows = self.spec.linear.n, self.spec.linear.k, 32 // self.form.bits, self.form.group == "row"
        groups = 1 if self.form.group == "row" else k // self.form.group
        along = 0 if stored.method == "compressed-tensors" else 1  # the axis of n

        def put(name: str, dtype: torch.dtype, size: int, packed: int | None = None) -> None:
            """A tensor of n and `size` elements, which are words along the axis `packed`."""
            shape = [n, size] if along == 0 else [size, n]
            given = {"output_dim": along, "weight_loader": loader}
            if packed is not None:
                shape[packed] = -(-shape[packed] // per)
                given |= {"packed_dim": packed, "packed_factor": per}
            if rows and size == 1:
                kind = ChannelQuantScaleParameter if packed is None else PackedColumnParameter
            else:
                kind = GroupQuantScaleParameter if packed is None else PackedvLLMParameter
                given["input_dim"] = 1 - along
            data = torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype)  # scales that are not loaded are refused
            layer.register_parameter(name, kind(data=data, **given))

        put(stored.codes, torch.int32, k, along if stored.method == "awq" else 1 - along)
        put(stored.scales, dtype, groups)
        if stored.method == "gptq" or self.form.zero:
            put(stored.zeros, torch.int32, groups, along)
        for name in stored.rest:
            unkept = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
            unkept.weight_loader = self._check_order if name.endswith("g_idx") else lambda *_: None  # type: ignore[attr-defined]
            layer.register_parameter(name, unkept)

    def _check_order(self, parameter: Any, loaded: Tensor, *_: Any) -> None:
        """Refuse channels that are not in the order of their groups: of each layer of a merged one, and before ranks divide them."""
        k = loaded.numel()
        group = k if self.form.group == "row" else int(self.form.group)
        unused = bool((loaded == -1).all())  # made, and never filled
        if not unused and not torch.equal(loaded.cpu().long(), torch.arange(k, device="cpu") // group):
            raise refused(self.name, "channels are not in the order of their groups (g_idx: act-order, desc_act)")

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Any) -> None:
        self.product = product(self.spec).result()
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        tensors = {name: getattr(layer, name).data for name in names}
        with refusing(self.name):
            packed = self._pack(tensors)
        for name in names:
            delattr(layer, name)
        layer.register_buffer("weight_packed", packed)  # the name by which vLLM finds the device of a layer (LoRA, MLA)

    def _pack(self, tensors: dict[str, Tensor]) -> Tensor:
        kernel, linear = self.product.kernel, self.spec.linear
        if self.stored is None:
            return kernel.quantize(tensors["weight"], clip=self.clip)
        given = {name: x for name, x in tensors.items() if x.numel()}
        if self.stored.method == "gptq":
            weight: Weight = gptq(**given, v2=self.stored.v2)
        elif self.stored.method == "awq":
            weight = awq(given["qweight"], given.get("qzeros"), given["scales"])
        else:
            weight = compressed(**given, weight_shape=torch.tensor([linear.n, linear.k], device="cpu"))
        weight = in_kernel_groups(self.name, weight)
        if linear.zero:
            weight = weight.with_zeros()
        elif weight.zeros is not None:
            raise UnsupportedError(self.name, "the checkpoint is symmetric by its configuration, and its zeros are not", is_backend=False)
        scales = weight.scales.to(torch_dtype(linear.dtype))
        if not bool(scales.isfinite().all()):
            raise ValueError(f"scales that were not loaded, or are not finite in {linear.dtype}")
        return kernel.pack(weight.codes, scales, weight.zeros)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Prompts, calls of more rows than kernels take, dequantize the layer's weight into temporary memory (`Product`)."""
        out = self.product(x, layer.weight_packed)
        return out if bias is None else out + bias
