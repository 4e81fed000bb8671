"""The other process: a spec and a schedule on standard input, the device kernels on standard output, both as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from typing import Any

from kvgen.lower.schedule import Schedule
from kvgen.lower.tilelang.traits import Traits, make_traits
from kvgen.spec import KernelSpec

PASSES = {
    "tl.disable_thread_storage_sync": True,  # the program places every barrier itself
    "tl.disable_safe_memory_legalize": True,  # and every bound: extents are run-time numbers
    "tl.disable_data_race_check": True,
    "tl.disable_out_of_bound_warning": True,
    "tl.disable_warp_specialized": True,
}
KERNEL = 'extern "C" __global__'


def lower(traits: Traits, form: str, arch: str) -> dict[str, Any]:
    """Run TileLang for both programs; `arch` is a compiler's name of an architecture (`sm_90a`).

    The splits of a plan are no cluster: a worker has work tiles of many cells.
    """
    program = importlib.import_module(f"kvgen.lower.tilelang.{form}.program").program
    static = lower_program(program(traits, planned=False), "attend_static", arch)
    return {"static": static, "planned": lower_program(program(replace(traits, cluster=False), planned=True), "attend_planned", arch)}


def lower_program(program: Any, name: str, arch: str) -> dict[str, Any]:
    """`text` is the generated kernel without TileLang's includes."""
    import tilelang
    from tvm.target import Target

    cuda = Target({"kind": "cuda", "arch": arch})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=PASSES), cuda:
        artifact = tilelang.lower(program.with_attr("global_symbol", name), target=cuda)
    (function,) = artifact.device_mod.functions.values()
    text = artifact.kernel_source
    return {
        "name": str(function.attrs["global_symbol"]),
        "text": text[text.index(KERNEL) :].rstrip() + "\n",
        "parameters": [str(parameter.name) for parameter in function.params],
        "shared_bytes": int(function.attrs["dyn_shared_memory_buf"]),
    }


def main() -> None:
    """Answer one request. Only the answer goes to standard output, whatever TileLang prints."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    schedule = Schedule.from_json(request["schedule"])
    traits = make_traits(KernelSpec(**request["spec"]), schedule)
    with os.fdopen(answer_to, "w") as answer:
        json.dump(lower(traits, schedule.launch.text("form"), request["arch"]), answer)


if __name__ == "__main__":
    main()
