"""The commit of a clone, what has changed since another, and what is said where nothing is known."""

import subprocess

import pytest

from experiments.harness import revision


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with one commit of two files of code."""
    monkeypatch.delenv("AO_LAB_COMMIT", raising=False)
    for cached in (revision.commit, revision.state, revision.changed_files):
        cached.cache_clear()

    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)
        for cached in (revision.commit, revision.state, revision.changed_files):
            cached.cache_clear()

    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "a.py").write_text("x = 1\n" * 20)
    (tmp_path / "fast" / "b.py").write_text("y = 1\n" * 20)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    yield tmp_path, git
    for cached in (revision.commit, revision.state, revision.changed_files):
        cached.cache_clear()


def test_uncommitted_changes_of_code_are_said_and_name_a_state(clone):
    root, git = clone
    commit = revision.commit(root)
    assert len(commit) == revision.DIGITS
    assert revision.state(root) == commit
    (root / "reports").mkdir()
    (root / "reports" / "rows.csv").write_text("a\n")
    git("status")
    assert revision.commit(root) == commit
    (root / "fast" / "c.py").write_text("z = 1\n")
    git("status")
    assert revision.commit(root) == f"{commit}+dirty"
    first = revision.state(root)
    (root / "fast" / "c.py").write_text("z = 2\n")
    git("status")
    assert revision.state(root) != first
    assert revision.state(root).startswith(f"{commit}+dirty-")


def test_files_that_changed_are_counted_and_moved_ones_are_not(clone):
    root, git = clone
    first = revision.commit(root)
    assert revision.changed_files(first, ("fast",), root) == 0
    git("mv", "fast/a.py", "fast/moved.py")
    git("commit", "-qm", "moved")
    assert revision.changed_files(first, ("fast",), root) == 0
    (root / "fast" / "b.py").write_text("y = 2\n" * 20)
    git("commit", "-qam", "changed")
    assert revision.changed_files(first, ("fast",), root) == 1
    assert revision.changed_files(f"{first}+dirty", ("fast",), root) == 1
    assert revision.changed_files(first, ("reference",), root) == 0
    assert revision.changed_files(revision.commit(root), ("fast",), root) == 0


def test_new_files_count_and_pages_do_not(clone):
    root, git = clone
    first = revision.commit(root)
    (root / "fast" / "new.py").write_text("z = 1\n")
    page = root / "experiments" / "linear"
    (page / "report").mkdir(parents=True)
    for path in (page / "page.py", page / "report" / "times.py"):
        path.write_text("x = 1\n")
    git("status")
    assert revision.changed_files(first, ("fast", "experiments/linear"), root) == 1
    (page / "run.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-qm", "more")
    assert revision.changed_files(first, ("fast", "experiments/linear"), root) == 2


def test_a_tree_of_which_git_says_nothing_is_not_clean(clone, monkeypatch):
    root, git = clone
    commit, real = revision.commit(root), revision.printed
    monkeypatch.setattr(revision, "printed", lambda *c, root: None if "status" in c else real(*c, root=root))
    git("status")
    assert revision.commit(root) == f"{commit}+dirty"


def test_variables_of_another_repository_change_nothing(clone, monkeypatch):
    root, git = clone
    commit = revision.commit(root)
    git("status")
    monkeypatch.setenv("GIT_DIR", str(revision.ROOT / ".git"))
    assert revision.commit(root) == commit


def test_a_copy_without_history_is_named_by_its_code(tmp_path, monkeypatch):
    """A dangling link is no file of it."""
    monkeypatch.delenv("AO_LAB_COMMIT", raising=False)
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / ".#a.py").symlink_to("nowhere")
    names = []
    for text, told in (("x = 1", None), ("x = 2", None), ("x = 2", "0832d6b6"), ("x = 3", "0832d6b6")):
        (tmp_path / "fast" / "a.py").write_text(text)
        if told:
            monkeypatch.setenv("AO_LAB_COMMIT", told)
        for cached in (revision.commit, revision.state):
            cached.cache_clear()
        names.append(revision.state(tmp_path))
    assert len({*names}) == 4
    assert [name.partition("-")[0] for name in names] == ["unknown", "unknown", "0832d6b6", "0832d6b6"]
    for cached in (revision.commit, revision.state):
        cached.cache_clear()


def test_what_nobody_knows_is_none(clone):
    root, _ = clone
    assert revision.changed_files("", ("fast",), root) is None
    assert revision.changed_files("00000000", ("fast",), root) is None


def test_a_copy_without_history_is_told_its_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("AO_LAB_COMMIT", raising=False)
    revision.commit.cache_clear()
    assert revision.commit(tmp_path) == ""
    monkeypatch.setenv("AO_LAB_COMMIT", "0832d6b6")
    for root in (tmp_path, revision.ROOT):
        revision.commit.cache_clear()
        assert revision.commit(root) == "0832d6b6"
    revision.commit.cache_clear()
