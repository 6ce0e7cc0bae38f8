"""Codecs by name: what is built in, what other packages offer, and what is refused."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import coldpage
from coldpage.codecs import PackedCodec, codec_names, create_codec
from coldpage.codecs.packed import PACKED_FORMATS
from coldpage.errors import ConfigurationError
from tests.conformance.packed_models import SMOL

BUILT_IN = ("concat", "int8", "fp8", "int4", "turbo4", "turbo3", "k8v4", "int4-block")

_Offer = Callable[..., None]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Offer:
    """Installs a package, on the import path, that offers codecs: names to Python expressions."""

    def install(package: str, codecs: dict[str, str]) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}_codecs:{name}" for name in codecs]
        (info / "entry_points.txt").write_text("\n".join(["[coldpage.codecs]", *lines, ""]))
        source = textwrap.dedent(
            """
            import coldpage
            from coldpage.testing.example_codecs import PaddingCodec

            def broken(pages):
                raise OSError("no licence")

            def refusing(pages):
                raise coldpage.ConfigurationError("this model is too new")
            """
        )
        source += "\n".join(f"{name} = {expression}" for name, expression in codecs.items())
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
    offer("zeta", {"padded": "lambda pages: PaddingCodec(16 * len(pages))"})
    offer("alpha", {"other": "None", "int8": "None"})
    assert codec_names() == (*BUILT_IN, "other", "padded")
    codec = create_codec("padded", SMOL.pages())
    assert (codec.codec_id, codec.parameters) == ("padding", "alignment=32"), "two layers"
    assert isinstance(create_codec("int8", {}), PackedCodec), "built-in names stay what they are"


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("None", "'offered' of alpha can not be made: .*not callable"),
        ("broken", "'offered' of alpha can not be made: .*no licence"),
        ("refusing", "^this model is too new$"),
        ("lambda pages: 5", "'offered' of alpha is 5: .*subclass of ColdPageCodec"),
        ("missing", "'offered' of alpha can not be made: NameError"),
    ],
)
def test_an_offer_that_does_not_work_says_why(
    offer: _Offer, expression: str, sentence: str
) -> None:
    offer("alpha", {"offered": expression})
    with pytest.raises(ConfigurationError, match=sentence):
        create_codec("offered", {})


def test_two_packages_with_one_name_are_refused(offer: _Offer) -> None:
    for package in ("alpha", "beta"):
        offer(package, {"same": "lambda pages: PaddingCodec(16)"})
    with pytest.raises(ConfigurationError, match=r"2 packages offer a codec 'same' \(.*alpha"):
        create_codec("same", {})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("int7", "there is no codec 'int7': choose one of concat, int8, .*int4-block$"),
        ("", "there is no codec ''"),
        ("INT8", "there is no codec 'INT8'"),
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
    offer("alpha", {"padded": "lambda pages: PaddingCodec(16)"})
    for spec in ("padded,1=int8", "int8,1=padded"):
        with pytest.raises(ConfigurationError, match=", ".join(PACKED_FORMATS)):
            create_codec(spec, {})
