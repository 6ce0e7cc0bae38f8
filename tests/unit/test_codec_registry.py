"""Codecs by name: what is built in, what other packages offer, and what is refused."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import coldpage
import coldpage.testing.example_codecs
from coldpage.codecs import (
    PackedCodec,
    codec_identity,
    codec_names,
    create_codec,
    registry,
    uses_calibration,
)
from coldpage.codecs.packed import PACKED_FORMATS
from coldpage.errors import ConfigurationError
from tests.conformance.packed_models import SMOL

BUILT_IN = ("concat", "int8", "fp8", "int4", "turbo4", "turbo3", "k8v4", "int4-block")

_Offer = Callable[..., None]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Offer:
    """Installs a package, on the import path, that offers codecs: names to Python expressions.
    ``owned`` in one puts the package before a codec's ``codec_id``.
    """

    def install(package: str, codecs: dict[str, str], version: str = "1.0") -> None:
        folder = tmp_path / f"{package}-{version}"
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        lines = [f"{name} = {package}_codecs:codec_{i}" for i, name in enumerate(codecs)]
        (info / "entry_points.txt").write_text("\n".join(["[coldpage.codecs]", *lines, ""]))
        source = textwrap.dedent(
            f"""
            import sys
            import coldpage
            from coldpage.testing.example_codecs import PaddingCodec

            def owned(codec):
                codec.codec_id = "{package}:" + codec.codec_id
                return codec

            def named(codec_id):
                codec = PaddingCodec(16)
                codec.codec_id = codec_id
                return codec

            def broken(pages):
                raise OSError("no licence")

            def refusing(pages):
                raise coldpage.ConfigurationError("this model is too new")
            """
        )
        source += "\n".join(f"codec_{i} = {make}" for i, make in enumerate(codecs.values()))
        (folder / f"{package}_codecs.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, f"{package}_codecs", raising=False)

    return install


def test_the_built_in_names() -> None:
    assert codec_names()[: len(BUILT_IN)] == BUILT_IN
    assert coldpage.codec_names is codec_names and coldpage.create_codec is create_codec


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_built_in_name_is_a_new_codec(name: str) -> None:
    first, second = (create_codec(name, SMOL.pages()) for _ in range(2))
    assert first is not second
    assert first.codec_id == name
    assert first.is_lossless == (name == "concat")
    assert isinstance(first, PackedCodec) == (name != "concat")


def test_a_list_of_lossless_names_is_the_lossless_codec() -> None:
    codec = create_codec("concat, 1=concat", {}, max_page_kernel_bytes=64)
    assert (codec.codec_id, codec.is_lossless, codec.parameters) == ("concat", True, "")


def test_a_package_offers_a_codec(offer: _Offer) -> None:
    offer("zeta", {"padded": "lambda pages: owned(PaddingCodec(16 * len(pages)))"})
    offer("alpha", {"other": "None", "int8": "None"})
    assert codec_names() == (*BUILT_IN, "other", "padded")
    codec = create_codec("padded", SMOL.pages())
    assert (codec.codec_id, codec.parameters) == ("zeta:padding", "alignment=32"), "two layers"
    assert isinstance(create_codec("int8", {}), PackedCodec), "built-in names stay what they are"


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("None", "'offered' of alpha can not be made: .*not callable"),
        ("broken", "'offered' of alpha can not be made: .*no licence"),
        ("refusing", "^this model is too new$"),
        ("lambda pages: 5", "'offered' of alpha is 5: .*subclass of ColdPageCodec"),
        ("missing", "'offered' of alpha can not be made: NameError"),
        ("sys.exit", "'offered' of alpha can not be made: SystemExit"),
        ("sys.exit(3)", r"'offered' of alpha can not be made: SystemExit\(3\)"),
        ("lambda pages: named('')", "PaddingCodec has the codec_id '': give it a name"),
    ],
)
def test_an_offer_that_does_not_work_says_why(
    offer: _Offer, expression: str, sentence: str
) -> None:
    offer("alpha", {"offered": expression})
    with pytest.raises(ConfigurationError, match=sentence):
        create_codec("offered", {})


@pytest.mark.parametrize(
    ("codec_id", "why", "proper"),
    [
        ("concat", ", which is that of a built-in codec", "a-pack:concat"),
        ("int8,1=turbo4", ", which is that of a built-in codec", "a-pack:int8,1=turbo4"),
        ("padding", "", "a-pack:padding"),
        ("beta:padding", "", "a-pack:padding"),
        ("a-pack-too:padding", "", "a-pack:padding"),
        ("a-pack", "", "a-pack:a-pack"),
    ],
)
def test_a_codec_id_that_another_may_have_is_refused(
    offer: _Offer, codec_id: str, why: str, proper: str
) -> None:
    """Pages on disk are found by it: another codec would decode them as its own."""
    offer("A__Pack", {"offered": f"lambda pages: named({codec_id!r})"})
    with pytest.raises(ConfigurationError) as raised:
        create_codec("offered", {})
    assert str(raised.value) == (
        f"codec 'offered' of A__Pack has the codec_id {codec_id!r}{why}: let it begin with its "
        f"package, such as {proper!r}, so that no codec reads the pages of another"
    )


def test_an_upgrade_of_a_package_reads_its_pages(offer: _Offer) -> None:
    identities = []
    for version in ("1.0", "2.0"):
        offer("alpha", {"padded": "lambda pages: owned(PaddingCodec(16))"}, version)
        identities.append(codec_identity(create_codec("padded", {})))
    assert identities == ["alpha:padding/1/alignment=16"] * 2


def test_a_refused_codec_is_closed(
    offer: _Offer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what goes wrong with that does not hide why."""
    closed: list[object] = []

    def close(codec: object) -> None:
        closed.append(codec)
        raise OSError("no")

    monkeypatch.setattr(coldpage.testing.example_codecs.PaddingCodec, "close", close, raising=False)
    offer("alpha", {"offered": "lambda pages: named('concat')"})
    with pytest.raises(ConfigurationError, match="has the codec_id 'concat'"):
        create_codec("offered", {})
    assert len(closed) == 1
    assert "codec concat failed in close" in caplog.text


def test_a_factory_that_returns_an_object_again_is_named(offer: _Offer) -> None:
    offer("alpha", {"same": "lambda pages, one=owned(PaddingCodec(16)): one"})
    create_codec("same", {}).is_consumed = True
    with pytest.raises(ConfigurationError) as raised:
        create_codec("same", {})
    assert str(raised.value) == (
        "codec 'same' of alpha is an object that a manager has had already: "
        "its entry point has to return a new one each time"
    )


def test_only_who_asks_for_a_calibration_gets_it(offer: _Offer) -> None:
    source = "type('Make', (), {'uses_calibration': %s, '__call__': lambda self, pages: %s})()"
    shown = "owned(PaddingCodec(1 + sum(it.key_means is not None for it in pages.values())))"
    offer("alpha", {"means": source % (True, shown), "plain": f"lambda pages: {shown}"})
    pages = SMOL.pages()
    assert all(it.key_means is not None for it in pages.values()), "two layers"
    assert create_codec("means", pages).parameters == "alignment=3"
    assert create_codec("plain", pages).parameters == "alignment=1"
    assert all(it.key_means is not None for it in pages.values()), "the caller's stay"
    assert [uses_calibration(name) for name in ("means", "plain")] == [True, False]
    built_in = {"concat": False, "int8": False, "turbo4": True, "int8,1=int4": True}
    assert {spec: uses_calibration(spec) for spec in built_in} == built_in
    with pytest.raises(ConfigurationError, match="there is no codec 'int7'"):
        uses_calibration("int7")


def test_names_that_can_not_be_asked_for_are_left_out(
    offer: _Offer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry._log_left_out.cache_clear()
    offer("alpha", {"a,b": "None", "int8": "None", "good": "None"})
    real = registry.entry_points
    point = EntryPoint("a=b", "beta:make", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **group: [*real(**group), point])
    for _ in range(2):
        assert codec_names() == (*BUILT_IN, "good")
    assert sorted(record.getMessage() for record in caplog.records) == [
        "codec 'a,b' of alpha is left out: the name has a ',' or '=' in it, "
        "which stand between names",
        "codec 'a=b' of beta:make is left out: the name has a ',' or '=' in it, "
        "which stand between names",
        "codec 'int8' of alpha is left out: the name is that of a built-in codec",
    ]
    with pytest.raises(ConfigurationError, match="there is no codec 'a=b'"):
        create_codec("a=b", {})


def test_two_packages_with_one_name_are_refused(offer: _Offer) -> None:
    for package in ("alpha", "beta"):
        offer(package, {"same": "lambda pages: owned(PaddingCodec(16))"})
    with pytest.raises(ConfigurationError, match=r"2 packages offer a codec 'same' \(.*alpha"):
        create_codec("same", {})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("int7", "there is no codec 'int7': choose one of concat, int8, .*int4-block$"),
        ("", "there is no codec ''"),
        ("INT8", "there is no codec 'INT8'"),
        ("int8:level=3", r"no codec 'int8:level=3' \(codecs take no options: a package has a name"),
        ("level=3", r"no codec 'level=3' \(codecs take no options"),
        ("1=int8", "put a codec for those first, such as concat,1=int8"),
        ("int8,turbo4", "'turbo4' is not GROUP=NAME"),
        ("int8,", "'' is not GROUP=NAME"),
        ("int8,-1=turbo4", "'-1=turbo4' is not GROUP=NAME"),
        ("int8,x=turbo4", "'x=turbo4' is not GROUP=NAME"),
        ("int8,1=int7", "'int7' is none of them"),
        ("int8,1=fp8,1=fp8", "names layer group 1 twice"),
    ],
)
def test_a_bad_name_is_refused_with_what_would_do(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        create_codec(spec, SMOL.pages())


def test_codecs_of_packages_are_not_mixed(offer: _Offer) -> None:
    offer("alpha", {"padded": "lambda pages: owned(PaddingCodec(16))"})
    for spec in ("padded,1=int8", "int8,1=padded", "padded,level=3"):
        with pytest.raises(ConfigurationError, match=", ".join(PACKED_FORMATS)):
            create_codec(spec, {})
    for spec in ("padded:level=3", "padded=3"):
        with pytest.raises(ConfigurationError, match=r"take no options: .* choose one .*, padded$"):
            create_codec(spec, {})
