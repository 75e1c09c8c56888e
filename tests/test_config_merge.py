"""The tables [merge] and [merge.slurm]: what they mean, and that each fault names its key and line."""

import pytest

from weighbridge.config.load import read_text
from weighbridge.config.settings import MergeSettings, Settings, SlurmSettings
from weighbridge.registry.errors import UsageError

SLURM = '[merge]\nexecutor = "slurm"\nscratch = "/shared/wb"\n[merge.slurm]\n'


def read(text: str) -> Settings:
    """Return the settings of a text."""
    return read_text(text, "/etc/weighbridge.toml", {"HOME": "/home/anna"}, resolve=False)


def test_without_the_tables_everything_has_its_default() -> None:
    """Merges are made here, in the state folder, and no base folder is named."""
    assert read("").merge == MergeSettings(
        executor="local", scratch=None, bases=(), behaviour=False, slurm=SlurmSettings()
    )


def test_every_key_is_parsed() -> None:
    """Times become seconds, sizes bytes, folders paths; words for sbatch stay as they are."""
    given = (
        'partition = "gpu"\naccount = "acme"\nqos = "high"\ngres = "gpu:h200:1"\ntime = "90m"\ncpus = 8\n'
        'memory = "4 GB"\npoll = "2s"\n'
    )
    more = 'bases = ["/srv/models"]\nbehaviour = true\n[merge.slurm]'
    merge = read(SLURM.replace("[merge.slurm]", more) + given).merge
    assert (merge.executor, merge.scratch, merge.bases, merge.behaviour) == (
        "slurm", "/shared/wb", ("/srv/models",), True,
    )  # fmt: skip
    assert merge.slurm == SlurmSettings("gpu", "acme", "high", "gpu:h200:1", 5400.0, 8, 4 * 10**9, 2.0)


@pytest.mark.parametrize(
    ("text", "key", "line", "says"),
    [
        ('[merge]\nexecutor = "slrum"\n', "merge.executor", 2, "did you mean 'slurm'?"),
        ('[merge]\nexecutor = "slurm"\n', "merge.executor", 2, "needs a scratch folder"),
        ('[merge]\nbases = ["models"]\n', "merge.bases", 2, "it is relative"),
        ('[merge]\nbehaviour = "auto"\n', "merge.behaviour", 2, "true or false"),
        ('[merge]\nscratsh = "/x"\n', "merge.scratsh", 2, "did you mean 'scratch'?"),
        ('[merge]\nslrum = "/x"\n', "merge.slrum", 2, "did you mean 'slurm'?"),
        ("merge = 3\n", "merge", 1, "a table is expected"),
        ("[merge]\nslurm = 3\n", "merge.slurm", 2, "a table is expected"),
        (SLURM + 'partitoin = "x"\n', "merge.slurm.partitoin", 5, "did you mean 'partition'?"),
        (SLURM + 'partition = "--wrap=id"\n', "merge.slurm.partition", 5, "no word for sbatch"),
        (SLURM + 'account = "a b"\n', "merge.slurm.account", 5, "no word for sbatch"),
        (SLURM + 'gres = ""\n', "merge.slurm.gres", 5, "it is empty"),
        (SLURM + "time = 60\n", "merge.slurm.time", 5, "a time with its unit is expected"),
        (SLURM + "cpus = 0\n", "merge.slurm.cpus", 5, "out of range"),
        (SLURM + 'memory = "much"\n', "merge.slurm.memory", 5, "is not a size"),
        ('[[watch]]\nroot = "/r"\nmerge_retry = "yes"\n', "watch[0].merge_retry", 3, "is not a choice"),
        ('[merge]\nscratch = "/r/x"\n[[watch]]\nroot = "/r"\n', "merge.scratch", 2, "lie inside each other"),
    ],
)
def test_each_fault_names_its_key_and_line(text: str, key: str, line: int, says: str) -> None:
    """A wrong key or value is refused with the place where it stands and what was meant."""
    with pytest.raises(UsageError) as caught:
        read(text)
    (problem,) = caught.value.data["problems"]
    assert (problem["key"], problem["line"]) == (key, line)
    assert says in problem["message"]
    assert problem["fix"] or "table is expected" in says or "empty" in says


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ('home = "team"\n', "[[watch]]"),
        ('[remotes.x]\nurl = "/srv/x"\nhome = "team"\n', "[[watch]]"),
        ('[daemon]\nhome = "team"\n', "[[watch]]"),
        ('[daemon]\nurl = "/srv/x"\n', "[remotes.NAME]"),
        ('[[watch]]\nroot = "/srv/x"\nstate = "/var/x"\n', "[daemon]"),
        ('[merge]\npartition = "gpu"\n', "[merge.slurm]"),
    ],
)
def test_a_key_in_another_table_is_told_its_own(document: str, where: str) -> None:
    """A key that exists elsewhere is not called unknown: the table that it belongs to is named."""
    error = refused(document)
    assert f"this key belongs to {where}" in f"{error.what} {error.why}"
    assert f"move it below {where}" in str(error.fix)


def test_what_is_empty_says_what_belongs_there() -> None:
    """Also an empty value has a fix."""
    assert "s3://bucket/prefix" in str(refused('[remotes.x]\nurl = ""\n').fix)
    assert refused('[remotes.x]\nurl = "/srv/x"\nregion = " "\n').fix


def refused(document: str) -> UsageError:
    """Return the error of a configuration that is not accepted."""
    with pytest.raises(UsageError) as caught:
        read(document)
    return caught.value
