"""Bundles and archives of the cache are taken only with the signature of a key that the operator trusts."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

import tilewright as tw
from tilewright_kit.contract.bundle import BundlePlan, write_bundle
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.record import request_to_dict
from tilewright_kit.types.errors import AccessError, InvalidArgumentError, NotFoundError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.build.cache import maintenance
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.engine.planning.warm_start import bundle_problems
from tilewright_server.protocol.signatures import check_signature, read_trusted, sign, signature_path
from tilewright_tools.cli import main
from tilewright_tools.cli.console.exits import Exit


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Files of a private key and its public one."""
    key = ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_key(tmp_path, "ours")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    desc = TensorDesc.of("fp32", (4, 4))
    request = OperationRequest("gemm", {"a": desc, "b": desc})
    path = tmp_path / "model.twb"
    write_bundle(path, [BundlePlan("gemm(...)", "x86-64-v2", b"plan", {}, {"request": request_to_dict(request)})])
    return path


def check(path: Path, public: Path) -> str:
    with path.open("rb") as file:
        return check_signature(path, file, read_trusted(public))


def test_a_signed_bundle_is_read(bundle: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    assert sign(bundle, private) == signature_path(bundle)
    assert len(check(bundle, public)) == 32
    assert len(bundle_problems(bundle, read_trusted(public))) == 1


def test_one_of_several_trusted_keys_is_enough(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    _, other = make_key(tmp_path, "other")
    both = tmp_path / "trusted.pem"
    both.write_bytes(other.read_bytes() + b"\n" + public.read_bytes())
    sign(bundle, private)
    assert check(bundle, both) == check(bundle, public)


def damage_content(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        where = signature_path(path)
        where.write_text(json.dumps(json.loads(where.read_text()) | fields))

    return change


def forge_digest(path: Path) -> None:
    """Another content, and its digest in the signature's file."""
    import hashlib

    damage_content(path)
    changed(sha256=hashlib.sha256(path.read_bytes()).hexdigest())(path)


BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("no signature", lambda path: signature_path(path).unlink(), "signature_missing"),
    ("other content", damage_content, "signature_content"),
    ("other content with its digest", forge_digest, "signature_damaged"),
    ("a signature that is cut off", lambda path: signature_path(path).write_text('{"sig'), "signature_damaged"),
    ("a signature of nothing", lambda path: signature_path(path).write_bytes(b""), "signature_damaged"),
    ("a signature without end", lambda path: signature_path(path).write_bytes(bytes(1 << 20)), "signature_damaged"),
    ("a list", lambda path: signature_path(path).write_text("[1]"), "signature_damaged"),
    ("another value", changed(value="AAAA"), "signature_damaged"),
    ("a value that is no base64", changed(value="???"), "signature_damaged"),
    ("another form", changed(signature=2), "signature_damaged"),
    ("no cipher", changed(algorithm="none"), "signature_damaged"),
    ("a number for a text", changed(sha256=7), "signature_damaged"),
    ("the name of another key", changed(key="00" * 16), "signature_key"),
]


@pytest.mark.parametrize(("change", "rule"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_what_is_not_signed_so_is_refused(
    change: Callable[[Path], None], rule: str, bundle: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    sign(bundle, private)
    change(bundle)
    with pytest.raises(AccessError) as caught:
        bundle_problems(bundle, read_trusted(public))
    assert caught.value.rule == rule and caught.value.fix


def test_a_foreign_key_is_refused(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    foreign, _ = make_key(tmp_path, "foreign")
    sign(bundle, foreign)
    with pytest.raises(AccessError) as caught:
        check(bundle, keys[1])
    assert caught.value.rule == "signature_key"


def test_a_file_that_is_no_key_is_refused_with_the_way_to_make_one(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    curve = ec.generate_private_key(ec.SECP256R1())
    other = tmp_path / "curve.pem"
    other.write_bytes(
        curve.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    for wrong in (keys[1], other, bundle):
        with pytest.raises(InvalidArgumentError, match="no private Ed25519 key") as caught:
            sign(bundle, wrong)
        assert "openssl genpkey" in caught.value.fix
    with pytest.raises(InvalidArgumentError, match="no public Ed25519 key"):
        read_trusted(keys[0])
    with pytest.raises(NotFoundError):
        read_trusted(tmp_path / "nothing.pub")


def test_keys_of_openssl_are_taken(bundle: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    subprocess.run([openssl, "genpkey", "-algorithm", "ed25519", "-out", str(private)], check=True)
    subprocess.run([openssl, "pkey", "-in", str(private), "-pubout", "-out", str(public)], check=True)
    sign(bundle, private)
    assert check(bundle, public)


def test_an_archive_without_a_trusted_signature_adds_nothing(keys: tuple[Path, Path], tmp_path: Path) -> None:
    cache, archive = ArtifactCache(tmp_path / "cache"), tmp_path / "kernels.tar"
    maintenance.export_entries(cache, archive)
    trusted = read_trusted(keys[1])
    with pytest.raises(AccessError):
        maintenance.import_entries(cache, archive, trusted)
    sign(archive, keys[0])
    assert maintenance.import_entries(cache, archive, trusted).added == ()


def test_commands_sign_and_require_signatures(
    keys: tuple[Path, Path], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    private, public = map(str, keys)
    folder, archive = str(tmp_path / "cache"), str(tmp_path / "kernels.tar.gz")
    assert main(["cache", "export", archive, "--cache-dir", folder, "--sign", private]) == Exit.OK
    assert main(["cache", "import", archive, "--cache-dir", folder, "--key", public]) == Exit.OK
    signature_path(Path(archive)).unlink()
    assert main(["cache", "import", archive, "--cache-dir", folder]) == Exit.OK
    monkeypatch.setenv("TILEWRIGHT_TRUSTED_KEYS", public)
    assert main(["cache", "import", archive, "--cache-dir", folder]) == Exit.USAGE
    assert "signature_missing" in capsys.readouterr().err
    assert main(["bundle", "verify", str(bundle)]) == Exit.FAILED
    assert "signature_missing" in capsys.readouterr().err
    assert main(["bundle", "run", str(bundle)]) == Exit.USAGE
    assert "signature_missing" in capsys.readouterr().err


# Clients


def test_a_client_opens_a_bundle_of_a_trusted_key(bundle: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(bundle, private)
    with tw.load_bundle(bundle, trusted_keys=public) as opened:
        assert [item.arch for item in opened.problems] == ["x86-64-v2"]


@pytest.mark.parametrize("wrong", ["unsigned", "foreign", "content", "damaged"])
def test_a_client_opens_no_other_bundle_where_it_names_keys(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path, wrong: str
) -> None:
    private, public = keys
    if wrong != "unsigned":
        sign(bundle, make_key(tmp_path, "other")[0] if wrong == "foreign" else private)
    if wrong == "content":
        damage_content(bundle)
    if wrong == "damaged":
        signature_path(bundle).write_text("[" * 60_000)
    with pytest.raises(tw.AccessError) as caught:
        tw.load_bundle(bundle, trusted_keys=public)
    rules = {"unsigned": "missing", "foreign": "key"}
    assert caught.value.rule == f"signature_{rules.get(wrong, wrong)}" and caught.value.fix


def test_a_client_says_what_is_wrong_with_files(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(tw.NotFoundError):
        tw.load_bundle(tmp_path / "none.twb", trusted_keys=keys[1])
    with pytest.raises(tw.NotFoundError):
        tw.load_bundle(bundle, trusted_keys=tmp_path / "none.pub")
    with pytest.raises(tw.InvalidArgumentError) as caught:
        tw.load_bundle(bundle, trusted_keys=bundle)
    assert caught.value.rule == "signature_key_file"
