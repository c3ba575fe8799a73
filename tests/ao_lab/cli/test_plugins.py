"""`ao-lab --import FILE`: formats and schemes of one's own on the command line."""

from ao_lab.cli.app import main
from reference.formats import formats
from reference.schemes import schemes


def test_a_file_of_ones_own_registers_schemes_first(tmp_path, capsys, monkeypatch):
    for names in (formats.FORMATS, schemes.SCHEMES):  # what is registered here is forgotten behind the test
        for name in ("imported_levels", "imported_scheme"):
            monkeypatch.setitem(names, name, None)
            del names[name]
    (tmp_path / "mine.py").write_text(
        "import ao_lab\n"
        "f = ao_lab.register(ao_lab.Format(name='imported_levels', kind='codebook', bits=1, table=(-1.0, 1.0)))\n"
        "ao_lab.register(ao_lab.Scheme(name='imported_scheme', element=f, scale=ao_lab.Scale(block=32, target=1.0)))\n"
    )
    assert main(["schemes", "imported_scheme"]) == 2
    assert main(["--import", str(tmp_path / "mine.py"), "schemes", "imported_scheme"]) == 0
    assert "imported_levels" in capsys.readouterr().out
    (tmp_path / "wrong.py").write_text(
        "import ao_lab\nao_lab.Format(name='x', kind='codebook', bits=1, table=(1.0,))\n"
    )
    for name, said in (("wrong.py", "a codebook of 1 bits"), ("none.py", "is no file; give a Python file")):
        assert main(["--import", str(tmp_path / name), "schemes"]) == 2
        assert said in capsys.readouterr().err
