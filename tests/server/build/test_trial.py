"""Binaries that compile and cannot be loaded are not published, and harm nobody but their own kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.build.pool import BuildPool
from tilewright_server.engine.call import Call

Unit = Callable[..., SourceUnit]
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 1; }\n'
CRASHES = "__attribute__((constructor)) static void begin() { __builtin_trap(); }\n"


def built(pool: BuildPool, unit: SourceUnit, arch: ArchSpec) -> str:
    build = pool.submit(unit, arch)
    build.wait(Call.within(60))
    return build.state


@pytest.mark.parametrize("how", ["no ELF file", "truncated", "crashes", "no such symbol"])
def test_what_cannot_be_loaded_is_not_published(how: str, pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    real = fake.path.read_text().splitlines()[-1].removeprefix("exec ")
    changes = {}
    if how == "no ELF file":
        fake.behave('echo garbage > "$out"')
    elif how == "truncated":
        fake.behave(f'{real}; head -c 700 "$out" > short; mv short "$out"')
    elif how == "crashes":
        changes = {"text": ANSWER + CRASHES}
    else:
        changes = {"entries": {"main": "answer", "other": "question"}}
    bad = unit(**changes)
    with pytest.raises(BuildFailedError) as caught:
        built(pool, bad, arch)
    assert caught.value.rule == "binary_unloadable"
    assert str(pool.cache.root) not in caught.value.log_tail
    if how == "no such symbol":
        assert "question" in caught.value.log_tail
    assert not pool.cache.contains(pool.key(bad, arch))
    fake.behave(f"exec {real}", version="fake 2.0")
    assert built(pool, unit(7), arch) == "built"


def test_one_process_loads_many_and_keeps_none_of_them(pool: BuildPool, unit: Unit, arch: ArchSpec) -> None:
    for number in range(6):  # the same name and entry each time, and another content
        assert built(pool, unit(number, name="same"), arch) == "built"
    trial = pool.toolchain("c++")._trial  # type: ignore[attr-defined]
    assert trial._helpers.idle == 1


def test_binary_for_another_machine_is_not_tried(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    foreign = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    foreign[18:20] = (0x2A2A).to_bytes(2, "little")
    fake.path.with_name("foreign").write_bytes(foreign)
    fake.behave(f'cp {fake.path.with_name("foreign")} "$out"')
    assert built(pool, unit(), arch) == "built"
