"""kvgen's quantized caches inside vLLM: an attention backend, which vLLM finds by an entry point (`vllm.general_plugins`).

vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvgen": {"preset": "saw-int4"}}'
"""


def register() -> None:
    """What vLLM calls in each of its processes, maybe more than once. It imports kvgen's backend only where it is chosen."""
    from kvgen.integrations.vllm import versions

    versions.register("kvgen.integrations.vllm.backend.KvgenBackend")
