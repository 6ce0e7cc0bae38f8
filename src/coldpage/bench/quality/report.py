"""Results as cells: the same for the terminal and for a document, and as rows for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from coldpage.bench.quality.evaluation import CodecQuality
from coldpage.bench.quality.metrics import TokenScores, VectorScores

__all__ = ["document_table", "printed_table", "result_rows"]


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[CodecQuality], str]


def _columns(results: Sequence[CodecQuality]) -> list[_Column]:
    """What can be said of these results."""
    texts = list(results[0].tokens_of)
    columns = [_Column("codec", lambda r: r.setting.name)]
    if results[0].speed is not None:
        columns.append(_Column("bytes against bf16", _ratio))
    columns.append(_Column("KL mean", lambda r: _small(r.tokens.kl_mean)))
    if len(texts) > 1:
        columns += [_Column(text, _kl_of(text)) for text in texts]
    columns += [
        _Column("KL p99", lambda r: _small(r.tokens.kl_p99)),
        _Column("top-1", lambda r: _part(r.tokens.top1)),
        _Column("perplexity", lambda r: f"{r.tokens.own_perplexity:.3f}"),
        _Column("K cosine (worst layer)", lambda r: _cosines(r.keys)),
        _Column("V cosine (worst layer)", lambda r: _cosines(r.values)),
        _Column(
            "error of K, V",
            lambda r: f"{_small(r.keys.relative_error)}, {_small(r.values.relative_error)}",
        ),
    ]
    if results[0].needles:
        columns.append(_Column("needles", _needles))
    if results[0].speed is not None:
        columns.append(_Column("encode, decode GB/s", _speeds))
    return columns


def printed_table(title: str, results: Sequence[CodecQuality]) -> Table:
    """One line a setting."""
    table = Table(title=title, show_edge=False)
    columns = _columns(results)
    for index, column in enumerate(columns):
        table.add_column(column.title, justify="right" if index else "left")
    for result in results:
        table.add_row(*(column.cell(result) for column in columns))
    return table


def document_table(results: Sequence[CodecQuality]) -> str:
    """The same in Markdown."""
    columns = _columns(results)
    rows = [[column.title for column in columns]]
    rows += [[column.cell(result) for column in columns] for result in results]
    head, *body = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def result_rows(result: CodecQuality) -> Iterator[Mapping[str, object]]:
    """One row a text, and one of all."""
    for name, scores in {"all": result.tokens, **result.tokens_of}.items():
        yield {
            "codec": result.setting.name,
            "separates_sinks": result.setting.separates_sinks,
            "num_recent_blocks": result.setting.num_recent_blocks,
            "text": name,
            **_token_row(scores),
            **({} if name != "all" else _whole_row(result)),
        }


def _token_row(scores: TokenScores) -> dict[str, object]:
    return {
        "num_positions": scores.kl.size,
        "kl_mean": scores.kl_mean,
        "kl_p99": scores.kl_p99,
        "top1": scores.top1,
        "perplexity": scores.own_perplexity,
        "lossless_perplexity": scores.lossless_perplexity,
    }


def _whole_row(result: CodecQuality) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, scores in (("key", result.keys), ("value", result.values)):
        row |= {
            f"{name}_cosine": scores.cosine,
            f"{name}_worst_layer_cosine": scores.worst_cosine,
            f"{name}_relative_error": scores.relative_error,
        }
    row["needles"] = [
        {
            "answer": said.needle.answer,
            "lossless": said.lossless,
            "own": said.own,
            "is_right": said.needle.is_in(said.own),
        }
        for said in result.needles
    ]
    speed = result.speed
    if speed is not None:
        row |= {
            "ratio_to_bf16": speed.ratio,
            "hot_bf16_bytes": speed.num_bytes,
            "encode_ms": list(speed.encode_ms),
            "decode_ms": list(speed.decode_ms),
            "copy_ms": list(speed.copy_ms),
            "encode_gb_per_s": speed.encode_gb_per_s,
            "decode_gb_per_s": speed.decode_gb_per_s,
            "copy_gb_per_s": speed.copy_gb_per_s,
        }
    return row


# ---------------------------------------------------------------------- cells


def _small(number: float) -> str:
    """Two digits; what is exactly 0 says so."""
    if number == 0.0:
        return "0"
    return f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _part(number: float) -> str:
    """All of it only where it is all."""
    return "1" if number == 1.0 else f"{min(number, 0.9999):.4f}"


def _cosines(scores: VectorScores) -> str:
    return f"{scores.cosine:.5f} ({scores.worst_cosine:.5f})"


def _kl_of(text: str) -> Callable[[CodecQuality], str]:
    return lambda result: _small(result.tokens_of[text].kl_mean)


def _ratio(result: CodecQuality) -> str:
    assert result.speed is not None
    return f"{result.speed.ratio:.3f}"


def _needles(result: CodecQuality) -> str:
    right = sum(said.needle.is_in(said.own) for said in result.needles)
    return f"{right} of {len(result.needles)}"


def _speeds(result: CodecQuality) -> str:
    assert result.speed is not None
    return f"{result.speed.encode_gb_per_s:.2f}, {result.speed.decode_gb_per_s:.2f}"
