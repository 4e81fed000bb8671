"""kvgen inside vLLM, which finds it by an entry point (`vllm.general_plugins`): quantized caches as an attention backend, and products over
4-bit and 8-bit weights as a quantization.

vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvgen": {"preset": "saw-int4"}}'
vllm serve MODEL --quantization kvgen
"""


def register() -> None:
    """What vLLM calls in each of its processes, maybe more than once. It imports kvgen's backend only where it is chosen."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from kvgen.integrations.vllm import versions, weights

    versions.register("kvgen.integrations.vllm.backend.KvgenBackend")
    register_quantization_config(weights.NAME)(weights.KvgenWeights)
