"""The name of a device, as measurements are kept under it."""

import platform
from pathlib import Path

import torch


def device_model(device: torch.device | str) -> str:
    """Name of the device as its vendor gives it, such as `NVIDIA H200` or a processor's model."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
