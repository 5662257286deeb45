from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread

from nnunet_cpr import CPR, SGDCPR, KappaK, KappaWS
from nnunet_cpr.nnunet.history import COLUMNS, History
from nnunet_cpr.nnunet.progress_figure import draw_progress
from tests.helpers.examples import examples

NAMES = ["layer.weight"]


def train(history: History, epochs: range, optimizer: SGDCPR, p: torch.nn.Parameter) -> None:
    for epoch in epochs:
        p.grad = -torch.ones_like(p)
        optimizer.step()
        history.append(epoch, optimizer.cpr)


def append(history: History, epoch: int) -> None:
    """Append an epoch with arbitrary values."""
    values = torch.tensor([[0.1, -0.2], [0.3, 1 / (epoch + 1)]])
    params = [(name, torch.nn.Parameter(j + values)) for j, name in enumerate(history.names)]
    for _, p in params:
        p.grad = torch.zeros(2, 2)
    cpr = CPR(params, kappa=KappaK(0.3))
    cpr.step()
    history.append(epoch, cpr)


def assert_same_epochs(resumed: History, history: History, count: int) -> None:
    """Check that the first ``count`` epochs, and no others, are equal bit for bit."""
    assert resumed.epochs == history.epochs[:count] and resumed.steps == history.steps[:count]
    for name in ("measure", "kappa", "multiplier"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(history, name)[:count])


@pytest.fixture
def run(tmp_path: Path) -> History:
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = SGDCPR([("layer.weight", p)], lr=0.001, kappa=KappaWS(2))
    history = History.resume(tmp_path, 0, NAMES)
    train(history, range(5), optimizer, p)
    return history


def test_file_contains_all_values(run: History) -> None:
    table = pd.read_csv(run.folder / "cpr_history.csv")
    assert table.columns.tolist() == COLUMNS
    assert table["epoch"].tolist() == [0, 1, 2, 3, 4] and table["step"].tolist() == [1, 2, 3, 4, 5]
    assert table["parameter"].unique().tolist() == ["layer.weight"]
    assert np.isinf(table["kappa"][:2]).all() and np.isfinite(table["kappa"][2:]).all()
    assert (table["multiplier"][:3] == 0).all() and table["multiplier"].max() > 0
    # Nine digits give a float32 back exactly.
    assert table["measure"].astype(np.float32).tolist() == [m[0] for m in run.measure]


@pytest.mark.parametrize("torn", [b"", b"5,6,layer.we", b"\x00\x00\x00"])
def test_resume_drops_epochs_that_are_trained_again(run: History, torn: bytes) -> None:
    with open(run.folder / "cpr_history.csv", "ab") as file:
        file.write(torn)
    resumed = History.resume(run.folder, 3, NAMES)
    assert resumed.epochs == [0, 1, 2] and resumed.names == run.names
    assert_same_epochs(resumed, run, 3)
    append(resumed, 3)
    assert pd.read_csv(run.folder / "cpr_history.csv")["epoch"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("1,2,layer", "1,2,other"),
        lambda text: text.replace("1,2,layer", "1,x,layer"),
    ],
)
def test_resume_drops_incomplete_epochs(run: History, damage) -> None:
    path = run.folder / "cpr_history.csv"
    path.write_bytes(damage(path.read_bytes().decode()).encode())
    damaged = path.read_bytes()
    resumed = History.resume(run.folder, 5, NAMES)
    assert resumed.epochs == [0, 2, 3, 4]
    assert resumed.backup.read_bytes() == damaged
    append(resumed, 5)
    draw_progress(resumed)

    # The warning is not repeated.
    again = History.resume(run.folder, 6, NAMES)
    assert again.epochs == [0, 2, 3, 4, 5] and again.backup is None


def test_nan_measures_are_kept(tmp_path: Path) -> None:
    history = History.resume(tmp_path, 0, NAMES)
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = SGDCPR([("layer.weight", p)], lr=0.1, kappa=KappaWS(1))
    train(history, range(3), optimizer, p)
    p.data.fill_(float("nan"))
    train(history, range(3, 5), optimizer, p)
    draw_progress(history)
    resumed = History.resume(tmp_path, 5, NAMES)
    assert resumed.epochs == [0, 1, 2, 3, 4] and np.isnan(resumed.measure[4][0])
    draw_progress(resumed)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n"])
def test_other_files_are_renamed(run: History, content: bytes) -> None:
    path = run.folder / "cpr_history.csv"
    for kept in ("cpr_history.unreadable.csv", "cpr_history.unreadable-2.csv"):
        path.write_bytes(content)
        resumed = History.resume(run.folder, 3, NAMES)
        assert resumed.epochs == [] and resumed.backup == run.folder / kept
        assert resumed.backup.read_bytes() == content


def test_history_of_other_parameters_is_renamed(run: History) -> None:
    before = (run.folder / "cpr_history.csv").read_bytes()
    resumed = History.resume(run.folder, 3, ["other.weight"])
    assert resumed.epochs == []
    assert resumed.backup.read_bytes() == before


def test_folder_in_place_of_the_file_is_renamed(run: History) -> None:
    path = run.folder / "cpr_history.csv"
    path.unlink()
    path.mkdir()
    (path / "inside").touch()
    resumed = History.resume(run.folder, 3, NAMES)
    assert (resumed.backup / "inside").exists()
    append(resumed, 3)
    assert pd.read_csv(path)["epoch"].tolist() == [3]


def test_new_training_starts_a_new_file(run: History) -> None:
    new = History.resume(run.folder, 0, NAMES)
    assert new.epochs == []
    append(new, 0)
    assert pd.read_csv(run.folder / "cpr_history.csv")["epoch"].tolist() == [0]


def test_resume_without_file_starts_one(tmp_path: Path) -> None:
    history = History.resume(tmp_path, 7, NAMES)
    assert history.epochs == [] and history.backup is None
    append(history, 7)
    assert pd.read_csv(tmp_path / "cpr_history.csv")["epoch"].tolist() == [7]


@pytest.mark.parametrize("name", ["a,b", 'a"b', "größe"])
def test_special_characters_in_names_are_kept(name: str, tmp_path: Path) -> None:
    append(History.resume(tmp_path, 0, [name]), 0)
    resumed = History.resume(tmp_path, 1, [name])
    assert resumed.epochs == [0] and resumed.backup is None
    assert pd.read_csv(tmp_path / "cpr_history.csv")["parameter"].tolist() == [name]


TWO = ["one.weight", "two.weight"]


def whole_file(folder: Path) -> tuple[History, bytes]:
    """Write three epochs of two parameters."""
    history = History.resume(folder, 0, TWO)
    for epoch in range(3):
        append(history, epoch)
    return history, (folder / "cpr_history.csv").read_bytes()


def test_truncated_file_gives_the_complete_epochs(tmp_path: Path) -> None:
    history, content = whole_file(tmp_path)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content)):
        (tmp_path / "cpr_history.csv").write_bytes(content[:cut])
        resumed = History.resume(tmp_path, 3, TWO)
        whole = sum(end <= cut for end in ends[2::2])  # after the header, two rows an epoch
        assert_same_epochs(resumed, history, whole)
        torn_off = cut not in (ends[0], *ends[2::2])
        assert (resumed.backup is not None) == torn_off, cut
        if resumed.backup is not None:
            assert resumed.backup.read_bytes() == content[:cut]
            resumed.backup.unlink()


numbers = st.floats(width=32) | st.sampled_from(["1e300", "nan", "-inf", "x", "", "1" * 5000])
rows = st.tuples(
    st.integers(-3, 5) | st.sampled_from(["", "1.5", "9" * 5000, "nan"]),
    st.integers(-3, 5) | st.sampled_from(["inf", "nan", "", "7" * 400]),
    st.sampled_from([*TWO, "other.weight", '"', "a,b"]),
    numbers,
    numbers,
    numbers,
).map(lambda row: ",".join(map(str, row)).encode())
header = ",".join(COLUMNS).encode()
tables = st.tuples(
    st.sampled_from([header, header, header, header[:-1], header + b",more", b""]),
    st.lists(rows | st.binary(max_size=20) | st.just(b'"' + b"x" * 140_000), max_size=8),
    st.sampled_from([b"\r\n", b"\n"]),
).map(lambda table: table[2].join([table[0], *table[1], b""]))


@functools.cache
def undamaged() -> bytes:
    with TemporaryDirectory() as folder:
        return whole_file(Path(folder))[1]


def damaged(bytes_there: dict[int, int]) -> bytes:
    content = bytearray(undamaged())
    for place, byte in bytes_there.items():
        content[place % len(content)] = byte
    return bytes(content)


damages = st.dictionaries(st.integers(0, 250), st.integers(0, 255), max_size=3).map(damaged)


@examples(100, search=1000)
@given(content=tables | damages | st.binary(max_size=200), before=st.integers(1, 4))
@example(content=damaged({0: 0, 5: 0}), before=1)  # a header with fewer fields than the rows
@example(content=undamaged() + b"0," + b"7" * 400 + b",one.weight,0,0,0\r\n", before=1)
def test_arbitrary_content_is_resumed_without_loss(content: bytes, before: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "cpr_history.csv"
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed = History.resume(folder, before, TWO)
        lengths = {len(x) for x in (resumed.steps, resumed.measure, resumed.kappa, resumed.multiplier)}
        assert lengths == {len(resumed.epochs)}
        assert all(len(r) == 2 and r.dtype == np.float32 for r in resumed.measure + resumed.kappa)
        assert resumed.epochs == sorted(set(resumed.epochs)) and set(resumed.epochs) <= set(
            range(before)
        )
        if resumed.backup is None:
            # Every line is in the history or of an epoch that is trained again.
            again = [int(line.split(b",")[0]) >= before for line in content.split(b"\n")[1:] if line]
            assert again.count(False) == 2 * len(resumed.epochs) and path.read_bytes() == content
        else:
            assert resumed.backup.read_bytes() == content

        # The continued history is readable.
        append(resumed, before)
        once_more = History.resume(folder, before + 1, TWO)
        assert once_more.backup is None
        assert_same_epochs(once_more, resumed, len(resumed.epochs))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of written files; the error is EFBIG instead of that of a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_rows_of_a_failed_write_are_written_later(run: History) -> None:
    path = run.folder / "cpr_history.csv"
    before = path.read_bytes()
    for epoch in (5, 6):
        with files_of_at_most(len(before) + 10), pytest.raises(OSError, match=r"cpr_history.csv"):
            append(run, epoch)
        assert path.read_bytes().startswith(before)
    append(run, 7)
    assert path.read_bytes().startswith(before)
    resumed = History.resume(run.folder, 8, NAMES)
    assert resumed.epochs == [0, 1, 2, 3, 4, 5, 6, 7] and resumed.backup is None
    assert_same_epochs(resumed, run, 8)


def test_changed_file_is_rewritten(run: History) -> None:
    path = run.folder / "cpr_history.csv"
    for change in (path.unlink, lambda: path.write_bytes(path.read_bytes()[:-30])):
        change()
        append(run, run.epochs[-1] + 1)
        assert pd.read_csv(path)["epoch"].tolist() == run.epochs


arrays = st.lists(
    st.tuples(*[st.lists(st.floats(width=32), min_size=2, max_size=2)] * 3), min_size=1, max_size=4
)


@pytest.mark.slow
@examples(10, search=50)
@given(epochs=arrays)
@example(epochs=[([1, 1], [0, -0.0], [np.inf, 1e-45])])
@example(epochs=[([3e38, -3e38], [1e-45, -1e-45], [-1, 3e38]), ([0, 0], [1, 1], [0, 0])])
def test_arbitrary_values_can_be_drawn(epochs: list[tuple[list[float], ...]]) -> None:
    """Values may come from a damaged file."""
    with TemporaryDirectory() as folder:
        history = History.resume(folder, 0, TWO)
        for epoch, values in enumerate(epochs):
            history._add(epoch, epoch, *(np.array(v, np.float32) for v in values))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_progress(history)
        assert imread(Path(folder) / "cpr_progress.png").std() > 0.05


def test_failed_figure_keeps_the_previous_one(run: History, monkeypatch) -> None:
    draw_progress(run)
    before = (run.folder / "cpr_progress.png").read_bytes()

    def full_disk(figure: Figure, path: Path, dpi: int) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full_disk)
    with pytest.raises(OSError, match="No space"):
        draw_progress(run)
    assert (run.folder / "cpr_progress.png").read_bytes() == before
    assert len(list(run.folder.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "nonsense\n\x00\n", ",".join(COLUMNS) + "\n0,1,a,x,1,0\n"])
def test_read_refuses_files_without_rows(content: str, tmp_path: Path) -> None:
    (tmp_path / "cpr_history.csv").write_text(content)
    with pytest.raises(ValueError, match="no row"):
        History.read(tmp_path)
