"""TLS, certificates, tokens and roles, over connections as a client in another machine makes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from authorities import Authority, Signed
from cryptography import x509
from rpc_harness import REAL, ServerProcess, eventually

import tilewright as tw

pytestmark = [pytest.mark.slow, pytest.mark.extended]

TOKEN = "a-token-that-nobody-guesses"
DEFAULTS: dict[str, Any] = {"listen": "127.0.0.1:0"}
POLICY = f"""
[[principal]]
name = "engine"
roles = ["dispatch"]
spiffe = ["spiffe://example.org/ns/prod/*"]

[[principal]]
name = "builder"
roles = ["dispatch", "build", "tune"]
certificate = ["builder"]

[[principal]]
name = "operator"
roles = ["administer"]
token_sha256 = ["{hashlib.sha256(TOKEN.encode()).hexdigest()}"]
"""


@pytest.fixture
def authority(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setitem(DEFAULTS, "cache_dir", kernel_cache)
    return Authority(tmp_path)


@contextmanager
def serving(tmp_path: Path, authority: Authority, **settings: Any) -> Iterator[ServerProcess]:
    own = authority.server()
    given = DEFAULTS | {"tls_cert": own.certificate, "tls_key": own.key} | settings
    with ServerProcess(tmp_path, REAL, **given) as server:
        assert server.alive, server.log()
        yield server


def client(server: ServerProcess, authority: Authority, who: Signed | None = None, token: str = "", **more: Any) -> Any:
    """A client that shows a certificate, or a token."""
    token_file = authority.folder / "token"
    token_file.write_text(token + "\n")
    tls = tw.Tls(
        ca=authority.path,
        certificate=who.certificate if who else None,
        key=who.key if who else None,
        token_file=token_file if token else None,
        server_name="localhost",
    )
    return tw.connect(server.addresses[0], tls=tls, timeout=5, **more)


def refused(kind: type[tw.TilewrightError], rule: str, call: Callable[[], Any]) -> tw.TilewrightError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.rule == rule, caught.value
    return caught.value


def engine(authority: Authority, name: str = "a") -> Signed:
    return authority.sign(name, x509.UniformResourceIdentifier(f"spiffe://example.org/ns/prod/{name}"))


def test_clients_of_the_authority_compute_and_others_do_not_get_in(tmp_path: Path, authority: Authority) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    mallory = Authority(foreign, "authority").sign("mallory")
    old = authority.sign("old", since=-9, until=-1)
    withdrawn = authority.sign("withdrawn")
    authority.revoke(tmp_path / "crl.pem", withdrawn)
    a = np.eye(4, dtype=np.float32)
    with serving(tmp_path, authority, tls_client_ca=authority.path, tls_crl=tmp_path / "crl.pem") as server:
        with client(server, authority, authority.sign("alice")) as one:
            assert (one.gemm(a, a) == a).all()
            assert one.report.placement == "server"
        for who in (mallory, old, None):
            refused(tw.UnavailableError, "server_reachable", lambda who=who: client(server, authority, who))
        refused(tw.AccessError, "revoked", lambda: client(server, authority, withdrawn))
        with pytest.raises(tw.UnavailableError):  # without TLS
            tw.connect(server.addresses[0], timeout=2)


@pytest.mark.parametrize("relay", [True, False])
def test_who_is_revoked_while_connected_is_refused_from_the_next_call_on(
    tmp_path: Path, authority: Authority, relay: bool
) -> None:
    policy, listed = tmp_path / "policy.toml", tmp_path / "crl.pem"
    names = ("alice", "bob", "carol")
    entry = f"[[principal]]\nname = 'all'\nroles = ['dispatch']\ncertificate = {list(names)}\n"
    policy.write_text(entry)
    signed = {name: authority.sign(name) for name in names}
    authority.revoke(listed)
    a = np.eye(4, dtype=np.float32)
    settings = {"tls_client_ca": authority.path, "tls_crl": listed, "policy": policy, "relay": relay}
    with serving(tmp_path, authority, **settings) as server, contextlib.ExitStack() as opened:
        clients = {name: opened.enter_context(client(server, authority, who)) for name, who in signed.items()}

        def answers(name: str) -> str:
            try:
                return str((clients[name].gemm(a, a) == a).all())
            except tw.AccessError as error:
                return error.rule

        assert [answers(name) for name in names] == ["True"] * 3
        listed.write_text("no list")  # the one before stays
        server.signal(signal.SIGHUP)
        assert eventually(lambda: "the certificates stay as they are" in server.log()), server.log()
        assert [answers(name) for name in names] == ["True"] * 3
        authority.revoke(listed, signed["alice"])
        fingerprint = signed["bob"].fingerprint
        policy.write_text(f"revoked = ['{fingerprint}']\n{entry}")
        server.signal(signal.SIGHUP)
        expected = ["revoked", "revoked", "True"]
        assert eventually(lambda: [answers(name) for name in names] == expected), server.log()
        for name in ("alice", "bob"):
            refused(tw.AccessError, "revoked", lambda name=name: client(server, authority, signed[name]))


def test_roles_say_who_may_build_tune_and_read_statistics(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    audit = tmp_path / "audit.jsonl"
    a = np.eye(4, dtype=np.float32)
    named = {"tls_client_ca": authority.path, "policy": tmp_path / "policy.toml", "audit_log": audit}
    with serving(tmp_path, authority, **named) as server:
        with client(server, authority, engine(authority)) as one:
            assert (one.gemm(a, a) == a).all()
            assert one.kernels.list("gemm", name="gemm_fp32_rrr_mem*")
            refused(tw.AccessError, "role", lambda: one.kernels.build(["gemm_x"]))
            error = refused(tw.AccessError, "role", one.kernels.statistics)
            assert error.value == "engine"
            assert "administer" in error.fix
        with client(server, authority, authority.sign("builder")) as two:
            name = two.kernels.list("gemm", name="gemm_fp32_rrr_mem*")[0].name
            config = two.kernels.describe(name).config
            assert two.kernels.register(config).name == name
            assert two.kernels.build([name])[-1].error is None
            refused(tw.AccessError, "role", two.kernels.statistics)
        refused(tw.AccessError, "principal", lambda: client(server, authority, authority.sign("nobody")))
        with client(server, authority, authority.sign("nobody"), token=TOKEN) as three:
            assert three.kernels.statistics()["sessions"] >= 1
        refused(tw.AccessError, "token", lambda: client(server, authority, engine(authority), token="guess"))
        wanted = {
            ("tilewright.v1.Memory/OpenSession", "principal:engine", "OK"),
            ("tilewright.v1.Kernels/Build", "principal:engine", "PERMISSION_DENIED"),
            ("tilewright.v1.Kernels/Register", "principal:builder", "OK"),
            ("tilewright.v1.Kernels/Build", "principal:builder", "OK"),
            ("tilewright.v1.Kernels/Statistics", "principal:operator", "OK"),
        }

        def lines() -> list[dict[str, Any]]:
            return [json.loads(line) for line in audit.read_text().splitlines()]

        assert eventually(lambda: wanted <= {(item["message"], item["principal"], item["result"]) for item in lines()})
        assert "UNAUTHENTICATED" in {item["result"] for item in lines()}
        assert audit.stat().st_mode & 0o777 == 0o600
        assert TOKEN not in audit.read_text() + server.log()


def test_a_session_is_of_no_use_to_another_principal(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    with (
        serving(tmp_path, authority, tls_client_ca=authority.path, policy=tmp_path / "policy.toml") as server,
        client(server, authority, engine(authority)) as one,
        client(server, authority, authority.sign("builder")) as two,
    ):
        stolen = one._subject.session.token
        from tilewright_proto.v1 import memory_pb2

        call = two._connected().unary("/tilewright.v1.Memory/Status")
        request = memory_pb2.StatusRequest(session=stolen).SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_policies_and_certificates_change_under_load(tmp_path: Path, authority: Authority) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    a = np.eye(8, dtype=np.float32)
    with (
        serving(tmp_path, authority, tls_client_ca=authority.path, policy=policy) as server,
        client(server, authority, engine(authority)) as one,
    ):
        over, wrong, done = threading.Event(), [], [0, 0]
        newcomer = engine(authority, "b")

        def on_one_connection() -> None:
            assert (one.gemm(a, a) == a).all()

        def on_a_new_connection() -> None:
            with client(server, authority, newcomer) as another:
                assert (another.gemm(a, a) == a).all()

        def load(index: int, call: Callable[[], None]) -> None:
            try:
                while not over.is_set():
                    call()
                    done[index] += 1
            except BaseException as error:
                wrong.append(error)

        def go_on(calls: int = 10, connections: int = 3) -> bool:
            """True once so many more calls, and calls over new connections, have ended."""
            seen = done[:]
            return eventually(lambda: bool(wrong) or (done[0] > seen[0] + calls and done[1] > seen[1] + connections))

        threads = [
            threading.Thread(target=load, args=item) for item in enumerate((on_one_connection, on_a_new_connection))
        ]
        for thread in threads:
            thread.start()
        assert go_on()
        fresh = authority.server("fresh")
        (tmp_path / "server.key").write_bytes(fresh.key.read_bytes())  # half of it: the old ones stay
        with client(server, authority, engine(authority)):
            pass
        assert "the certificates stay as they are" in server.log()
        assert go_on()
        (tmp_path / "server.pem").write_bytes(fresh.certificate.read_bytes())
        assert served(server, authority) == fresh.fingerprint
        assert go_on()
        policy.write_text(POLICY + "\n[[principal]]\nname = 'x'\nroles = ['fly']\nuid = [1]\n")
        server.signal(signal.SIGHUP)
        assert eventually(lambda: "the policy stays as it is" in server.log())
        assert "fly" in server.log()
        assert go_on()
        over.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert wrong == []
        policy.write_text(POLICY.replace("ns/prod/*", "ns/other/*"))
        server.signal(signal.SIGHUP)

        def is_refused() -> bool:
            try:
                one.gemm(a, a)
            except tw.AccessError as error:
                return error.rule == "principal"
            return False

        assert eventually(is_refused), "the next call, of a connection that is open"


def served(server: ServerProcess, authority: Authority) -> str:
    """Fingerprint of the certificate that a new connection is shown."""
    import ssl

    from cryptography.hazmat.primitives import hashes

    who = authority.sign("looker")
    host, _, port = server.addresses[0].rpartition(":")
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(who.certificate, who.key)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    import socket

    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as wrapped:
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).fingerprint(hashes.SHA256()).hex()


def test_tokens_alone_prove_who_calls(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "policy.toml").write_text(POLICY.replace('["administer"]', '["dispatch"]'))
    with serving(tmp_path, authority, listen="0.0.0.0:0", policy=tmp_path / "policy.toml") as server:
        server.addresses = [server.addresses[0].replace("0.0.0.0", "127.0.0.1")]
        a = np.eye(4, dtype=np.float32)
        with client(server, authority, token=TOKEN) as one:
            assert (one.gemm(a, a) == a).all()
        refused(tw.AccessError, "principal", lambda: client(server, authority))


def test_the_server_watches_itself_behind_tls(tmp_path: Path, authority: Authority) -> None:
    with serving(tmp_path, authority, tls_client_ca=authority.path, watchdog_s=1.0) as server:
        time.sleep(2.5)
        assert server.alive, server.log()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"listen": "0.0.0.0:0"}, "beyond loopback"),
        ({"listen": "0.0.0.0:0", "insecure": "true"}, "beyond loopback"),
        ({"tls_cert": "no.pem", "tls_key": "no.key", "tls_client_ca": "no.pem"}, "cannot be read"),
        ({"policy": "policy.toml"}, "principal[0].roles"),
        ({"audit_log": "none/audit.jsonl"}, "audit log"),
    ],
)
def test_mistakes_are_told_before_it_serves(tmp_path: Path, settings: dict[str, str], text: str) -> None:
    (tmp_path / "policy.toml").write_text('[[principal]]\nname = "a"\nroles = ["fly"]\nuid = [1]\n')
    paths = {name: str(tmp_path / value) for name, value in settings.items() if name not in ("listen", "insecure")}
    server = ServerProcess(tmp_path, REAL, **settings | paths)
    assert (server.ready, server.wait()) == ("", 1)
    assert text in server.log()


def test_a_key_of_another_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    one, two = authority.server("one"), authority.server("two")
    server = ServerProcess(
        tmp_path, REAL, listen="127.0.0.1:0", insecure=True, tls_cert=one.certificate, tls_key=two.key
    )
    assert (server.ready, server.wait()) == ("", 1)
    assert "cannot be used" in server.log()


def test_users_of_unix_sockets_have_roles_where_the_policy_names_them(tmp_path: Path) -> None:
    import os

    policy = tmp_path / "policy.toml"
    policy.write_text(f"[[principal]]\nname = 'me'\nroles = ['dispatch']\nuid = [{os.geteuid()}]\n")
    with (
        ServerProcess(tmp_path, REAL, policy=tmp_path / "policy.toml") as server,
        tw.connect(server.addresses[0]) as one,
    ):
        a = np.eye(4, dtype=np.float32)
        assert (one.gemm(a, a, launch="server") == a).all()
        refused(tw.AccessError, "role", one.kernels.statistics)


def test_the_open_inference_protocol_goes_by_proofs_and_roles_too(tmp_path: Path, authority: Authority) -> None:
    from tilewright_proto.inference import inference_pb2 as pb

    (tmp_path / "policy.toml").write_text(POLICY)
    a = np.arange(16, dtype=np.float32).reshape(4, 4)
    product = pb.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[a.tobytes(), a.tobytes()])
    for name in ("a", "b"):
        product.inputs.add(name=name, datatype="FP32", shape=[4, 4])
    ask = pb.ModelStatisticsRequest(name="tilewright.gemm")

    def code(server: ServerProcess, method: str, request: Any, who: Signed | None = None, token: str = "") -> str:
        shown = (who.key.read_bytes(), who.certificate.read_bytes()) if who else (None, None)
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), *shown)
        name = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(server.addresses[0], credentials, name) as channel:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}", type(request).SerializeToString)
            try:
                reply = call(request, metadata=[("authorization", f"Bearer {token}")] if token else None, timeout=60)
            except grpc.RpcError as error:
                return str(error.code().name)
        if method == "ModelInfer":
            assert pb.ModelInferResponse.FromString(reply).raw_output_contents == [(a @ a).tobytes()]
        return "OK"

    with serving(tmp_path, authority, tls_client_ca=authority.path, policy=tmp_path / "policy.toml") as server:
        one, nobody = engine(authority), authority.sign("nobody")
        assert code(server, "ModelInfer", product, one) == "OK"
        assert code(server, "ModelStatistics", ask, one) == "PERMISSION_DENIED"
        assert code(server, "ModelStatistics", ask, nobody, TOKEN) == "OK"
        assert code(server, "ModelInfer", product, nobody) == "UNAUTHENTICATED"
        assert code(server, "ModelInfer", product, one, "guess") == "UNAUTHENTICATED"
        assert code(server, "ModelInfer", product) == "UNAVAILABLE"
