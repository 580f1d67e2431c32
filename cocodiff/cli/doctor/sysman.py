"""Fabric ports and PCI addresses of Intel GPUs, from Level Zero's system management library through ctypes.

Written from the Level Zero specification (its Sysman chapter); it has not run on such a machine. The library reads
ZES_ENABLE_SYSMAN=1 when it is initialised. Devices are cards, whatever ZE_FLAT_DEVICE_HIERARCHY says.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from typing import Any, NamedTuple

LIBRARY = "libze_loader.so.1"
PCI_PROPERTIES, PORT_PROPERTIES, PORT_STATE = 0x2, 0x6, 0x19  # zes_structure_type_t
HEALTHY, DEGRADED = 1, 2  # zes_fabric_port_status_t
STATUS = {0: "unknown", HEALTHY: "healthy", DEGRADED: "degraded", 3: "failed", 4: "disabled"}


def _structure(name: str, **members: Any) -> Any:
    """A C structure of these members, in this order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(members.items())})


_HEAD = {"stype": c_int32, "next": c_void_p}
PortId = _structure("PortId", fabric=c_uint32, attach=c_uint32, number=c_uint8)
Speed = _structure("Speed", bit_rate=c_int64, width=c_int32)
_DEVICE = {"model": c_char * 256, "on_subdevice": c_uint8, "subdevice": c_uint32}
PortProperties = _structure("PortProperties", **_HEAD, **_DEVICE, id=PortId, max_rx=Speed, max_tx=Speed)
_STATUS = {"status": c_int32, "quality_issues": c_uint32, "failure_reasons": c_uint32}
PortState = _structure("PortState", **_HEAD, **_STATUS, remote=PortId, rx=Speed, tx=Speed)
PciAddress = _structure("PciAddress", **dict.fromkeys(("domain", "bus", "device", "function"), c_uint32))
PciSpeed = _structure("PciSpeed", generation=c_int32, width=c_int32, bandwidth=c_int64)
_COUNTED = dict.fromkeys(("has_bandwidth", "has_packets", "has_replays"), c_uint8)
PciProperties = _structure("PciProperties", **_HEAD, address=PciAddress, max_speed=PciSpeed, **_COUNTED)


class Port(NamedTuple):
    """card: its place among the devices; end and remote: (fabric id of the card, attach id, port number)."""

    card: int
    subdevice: int
    end: tuple[int, int, int]
    remote: tuple[int, int, int]
    status: int


class Sysman(NamedTuple):
    addresses: tuple[str, ...]
    ports: tuple[Port, ...]


def read_sysman(library: Any = None) -> Sysman | str:
    """All cards and ports of this host, or why they cannot be read. library: what stands in for the real one."""
    os.environ.setdefault("ZES_ENABLE_SYSMAN", "1")
    try:
        ze = ctypes.CDLL(LIBRARY) if library is None else library
        devices = list(_devices(ze))
        addresses = tuple(_address(ze, device) for device in devices)
        return Sysman(
            addresses, tuple(port for card, device in enumerate(devices) for port in _ports(ze, card, device))
        )
    except (OSError, AttributeError) as error:
        return f"no {LIBRARY} with sysman ({error})" if library is None else str(error)


def _call(function: Any, *arguments: Any) -> None:
    result = function(*arguments)
    if result:
        raise OSError(f"{getattr(function, '__name__', 'Level Zero')} answered {result & 0xFFFFFFFF:#x}")


def _handles(function: Any, *before: Any) -> list[c_void_p]:
    count = c_uint32(0)
    _call(function, *before, byref(count), None)
    handles = (c_void_p * count.value)()
    if count.value:
        _call(function, *before, byref(count), ctypes.cast(handles, POINTER(c_void_p)))
    return [c_void_p(handle) for handle in handles]


def _devices(ze: Any) -> Iterator[c_void_p]:
    """zesInit is of newer loaders; with ZES_ENABLE_SYSMAN=1 zeInit serves older ones, and its handles are the same."""
    if hasattr(ze, "zesInit"):
        _call(ze.zesInit, c_uint32(0))
        drivers, devices = ze.zesDriverGet, ze.zesDeviceGet
    else:
        _call(ze.zeInit, c_uint32(0))
        drivers, devices = ze.zeDriverGet, ze.zeDeviceGet
    for driver in _handles(drivers):
        yield from _handles(devices, driver)


def _address(ze: Any, device: c_void_p) -> str:
    properties = PciProperties(stype=PCI_PROPERTIES)
    _call(ze.zesDevicePciGetProperties, device, byref(properties))
    at = properties.address
    return f"{at.domain:04x}:{at.bus:02x}:{at.device:02x}.{at.function}"


def _ports(ze: Any, card: int, device: c_void_p) -> Iterator[Port]:
    for handle in _handles(ze.zesDeviceEnumFabricPorts, device):
        properties, state = PortProperties(stype=PORT_PROPERTIES), PortState(stype=PORT_STATE)
        _call(ze.zesFabricPortGetProperties, handle, byref(properties))
        _call(ze.zesFabricPortGetState, handle, byref(state))
        subdevice = properties.subdevice if properties.on_subdevice else 0
        yield Port(card, subdevice, _end(properties.id), _end(state.remote), state.status)


def _end(port: Any) -> tuple[int, int, int]:
    return (port.fabric, port.attach, port.number)


def fabric_links(ports: Sequence[Port], tiles: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Links between tiles (card x tiles + subdevice) over ports that work, and a line for each port that does not."""
    tile_of = {port.end: port.card * tiles + port.subdevice for port in ports}
    links, broken = [], []
    for port in ports:
        here = tile_of[port.end]
        if port.status in (HEALTHY, DEGRADED) and port.remote in tile_of:
            links.append((here, tile_of[port.remote]))
        if port.status in (DEGRADED, 3):
            broken.append(f"port {port.end[2]} of tile {here} is {STATUS[port.status]}")
    return links, broken
