"""Level Zero's sysman as a stand-in that fills the same structures: what is asked of it, and the planes that result."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from typing import Any

import pytest
from worlds import topology_of

from cocodiff.cli.doctor import sysman
from cocodiff.cli.doctor.planes import from_links, same_planes
from cocodiff.cli.doctor.sysman import fabric_links, read_sysman

AURORA = topology_of("aurora", 12)
Tile = tuple[int, int]


class Node:
    """Six cards of two tiles; every tile has a port to each other tile of its plane, with ids that are not indices."""

    def __init__(self, failed: Tile | None = None, old: bool = False) -> None:
        planes = AURORA.machine.planes
        tiles = [(tile // 2, tile % 2) for tile in range(12)]
        self.links = [
            (a, b) for i, a in enumerate(tiles) for j, b in enumerate(tiles) if i != j and planes[i] == planes[j]
        ]
        self.failed, self.asked = failed, []
        if not old:
            self.zesInit, self.zesDriverGet, self.zesDeviceGet = self.init, self.drivers, self.devices
        self.zeInit, self.zeDriverGet, self.zeDeviceGet = self.init, self.drivers, self.devices

    def init(self, flags: Any) -> int:
        return 0

    def drivers(self, count: Any, into: Any) -> int:
        return self.fill(count, into, [1])

    def devices(self, driver: Any, count: Any, into: Any) -> int:
        return self.fill(count, into, range(100, 106))

    def zesDeviceEnumFabricPorts(self, device: Any, count: Any, into: Any) -> int:
        own = [1000 + n for n, (a, _) in enumerate(self.links) if a[0] == device.value - 100]
        return self.fill(count, into, own)

    @staticmethod
    def fill(count: Any, into: Any, handles: Any) -> int:
        handles = list(handles)
        count._obj.value = len(handles)
        if into is not None:
            for n, handle in enumerate(handles):
                into[n] = handle
        return 0

    def zesDevicePciGetProperties(self, device: Any, properties: Any) -> int:
        assert properties._obj.stype == 2
        properties._obj.address.bus = device.value - 90
        return 0

    def end(self, a: Tile, b: Tile) -> tuple[int, int, int]:
        return (70 + a[0], 5 + a[1], b[0])

    def zesFabricPortGetProperties(self, port: Any, properties: Any) -> int:
        a, b = self.links[port.value - 1000]
        assert properties._obj.stype == 6
        properties._obj.on_subdevice, properties._obj.subdevice = 1, a[1]
        properties._obj.id = sysman.PortId(*self.end(a, b))
        return 0

    def zesFabricPortGetState(self, port: Any, state: Any) -> int:
        a, b = self.links[port.value - 1000]
        assert state._obj.stype == 0x19
        state._obj.status = 3 if a == self.failed else 1
        state._obj.remote = sysman.PortId(*self.end(b, a))
        return 0


@pytest.mark.parametrize("old", [False, True])
def test_auroras_planes_are_found(old):
    found = read_sysman(Node(old=old))
    assert not isinstance(found, str)
    assert found.addresses[0] == "0000:0a:00.0" and len(found.addresses) == 6 and len(found.ports) == 60
    links, broken = fabric_links(found.ports, 2)
    assert same_planes(from_links(12, links), AURORA.machine.planes) and broken == []


def test_failed_ports_are_named():
    found = read_sysman(Node(failed=(1, 0)))
    assert not isinstance(found, str)
    links, broken = fabric_links(found.ports, 2)
    assert len(broken) == 5 and broken[0] == "port 0 of tile 2 is failed"
    assert same_planes(from_links(12, links), AURORA.machine.planes)  # the other end still says it is healthy


def test_what_cannot_be_read_says_why():
    assert re.match("no libze_loader.so.1", str(read_sysman())) or shutil.which("xpu-smi")
    node = Node()
    node.zesInit = lambda flags: 0x78000001
    assert "0x78000001" in str(read_sysman(node))


C_SIZES = """
#include <stdint.h>
#include <stdio.h>
#include <stddef.h>
typedef struct { uint32_t a, b; uint8_t c; } id; typedef struct { int64_t r; int32_t w; } speed;
typedef struct { int s; void *n; char m[256]; uint8_t on; uint32_t sub; id i; speed x, y; } properties;
typedef struct { int s; const void *n; int st; uint32_t q, f; id r; speed x, y; } state;
typedef struct { int s; void *n; struct { uint32_t a, b, c, d; } at; struct { int32_t g, w; int64_t b; } m;
    uint8_t x, y, z; } pci;
int main(void) { printf("%zu %zu %zu %zu %zu", sizeof(properties), offsetof(properties, i), sizeof(state),
    offsetof(state, r), sizeof(pci)); }
"""


def test_structures_lie_as_a_c_compiler_lays_them(tmp_path):
    """The members are those that the specification gives for a port's properties and state, and for a PCI address."""
    (tmp_path / "sizes.c").write_text(C_SIZES)
    subprocess.run(["cc", "sizes.c", "-o", "sizes"], cwd=tmp_path, check=True)
    told = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout
    own = (
        ctypes.sizeof(sysman.PortProperties),
        sysman.PortProperties.id.offset,
        ctypes.sizeof(sysman.PortState),
        sysman.PortState.remote.offset,
        ctypes.sizeof(sysman.PciProperties),
    )
    assert told == " ".join(map(str, own))
