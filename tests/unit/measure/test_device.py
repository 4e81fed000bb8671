from __future__ import annotations

import json
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvgen.measure import device
from kvgen.measure.device import cold_bytes, fingerprint


def test_cpu_fingerprint_is_stable_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = fingerprint("cpu")
    assert facts == fingerprint("cpu") == json.loads(json.dumps(facts))
    assert facts["kind"] == "cpu"
    assert facts["name"]
    monkeypatch.setattr(device, "cpu_features", lambda: "flags: none")
    assert fingerprint("cpu")["features"] != facts["features"]


@pytest.mark.parametrize("llc", [1 << 20, 32 << 20, 480 << 20])
def test_inputs_rotate_past_the_last_cache(monkeypatch: pytest.MonkeyPatch, llc: int) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps({"llc_bytes": llc, "cores": 64}))
    assert cold_bytes("cpu") > llc
    assert (fingerprint("cpu")["llc_bytes"], fingerprint("cpu")["cores"]) == (llc, 64)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(L2_cache_size=llc))
    assert cold_bytes("cuda") >= 20 * llc


def test_without_a_driver_a_gpu_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert fingerprint("sm90") == {"kind": "cuda"}


class Nvml:
    """700 W at 1,500 MHz once the clock has fallen from 1,980; 650 W in the average over a second."""

    NVML_CLOCK_SM = 1
    NVML_FI_DEV_POWER_INSTANT = 186

    def __init__(self, instant: bool = True) -> None:
        self.asked, self.instant = 0, instant

    def nvmlDeviceGetFieldValues(self, handle, fields):
        return [SimpleNamespace(nvmlReturn=0 if self.instant else 3, value=SimpleNamespace(uiVal=700_000))]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle, which):
        self.asked += 1
        return 1980 if self.asked == 1 else 1500


@pytest.mark.parametrize(("nvml", "wanted"), [(Nvml(), (700.0, 1500.0)), (Nvml(instant=False), (650.0, 1500.0)), (None, (None, None))])
def test_the_settled_half_of_the_readings_of_power_and_clock_counts(monkeypatch: pytest.MonkeyPatch, nvml, wanted) -> None:
    @contextmanager
    def opened():
        yield None if nvml is None else (nvml, "handle")

    monkeypatch.setattr(device, "nvml_device", opened)
    monkeypatch.setattr(device, "ask", lambda function, *args: function(*args))
    monkeypatch.setattr(device, "POLL_SECONDS", 0.001)
    with device.metered() as found:
        while nvml is not None and nvml.asked < 4:
            time.sleep(0.001)
    assert (found.watts, found.clock_mhz) == wanted
