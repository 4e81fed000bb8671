"""The other process: a spec and a schedule on standard input, the device kernels on standard output, both as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kvgen.lower.schedule import Schedule
from kvgen.lower.tilelang.sizes import Sizes, sizes_of
from kvgen.spec import KernelSpec

ARCH = "sm_80"
"""The programs use nothing that came later; nvcc compiles them for the target."""
PASSES = {
    "tl.disable_thread_storage_sync": True,  # the program places every barrier itself
    "tl.disable_safe_memory_legalize": True,  # and every bound: extents are run-time numbers
    "tl.disable_data_race_check": True,
    "tl.disable_out_of_bound_warning": True,
    "tl.disable_warp_specialized": True,
}
KERNEL = 'extern "C" __global__'


def lower(sizes: Sizes) -> dict[str, Any]:
    """Run TileLang for both programs."""
    from kvgen.lower.tilelang.program import program

    return {name: lower_program(program(sizes, planned=name == "planned"), f"attend_{name}") for name in ("static", "planned")}


def lower_program(program: Any, name: str) -> dict[str, Any]:
    """`text` is the generated kernel without TileLang's includes."""
    import tilelang
    from tvm.target import Target

    cuda = Target({"kind": "cuda", "arch": ARCH})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=PASSES), cuda:
        artifact = tilelang.lower(program.with_attr("global_symbol", name), target=cuda)
    (function,) = artifact.device_mod.functions.values()
    text = artifact.kernel_source
    return {
        "name": str(function.attrs["global_symbol"]),
        "text": text[text.index(KERNEL) :].rstrip() + "\n",
        "parameters": [str(parameter.name) for parameter in function.params],
    }


def main() -> None:
    """Answer one request. Only the answer goes to standard output, whatever TileLang prints."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    sizes = sizes_of(KernelSpec(**request["spec"]), Schedule.from_json(request["schedule"]))
    with os.fdopen(answer_to, "w") as answer:
        json.dump(lower(sizes), answer)


if __name__ == "__main__":
    main()
