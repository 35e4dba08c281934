"""Rules that the tree itself must keep: layers, exports, file lengths, output, characters, links."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moecomm"

# A module imports its own layer and those below it, never one above.
LAYERS = [
    {"_C", "errors", "groups", "placement", "topology", "topology_drawing", "version"},
    {"kernels"},
    {"devices"},
    {"transports"},
    {"codecs"},
    {"algorithms"},
    {"checks", "exchanger", "explanation", "handle", "recompute", "status", "work"},
    {"gradients"},
    {"functional"},
    {"communicator"},
    {"nn"},
    {"testing"},
    {"bench", "cli", "demo", "integrations"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# These name things that exist once per kind; only their registry may know them by name.
CONCRETE = {
    "transports": {"base", "domains", "peers", "registry"},
    "kernels": {
        "base",
        "choices",
        "eager",
        "experts",
        "far_runs",
        "flat_rows",
        "registry",
        "signals",
        "summary",
        "wire",
    },
    "codecs": {"base", "registry"},
    "devices": {"base", "queue", "registry", "views"},
}
SPEAKS_TO_PEOPLE = {"cli", "demo", "bench", "__main__"}


def tracked(*patterns):
    """Files under version control (or about to be), so that caches and build folders do not count."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:  # an unpacked archive
        found = [path for pattern in patterns for path in ROOT.rglob(pattern)]
        hidden = {".venv", "build", "dist", ".git"}
        return sorted(path for path in found if not hidden & set(path.relative_to(ROOT).parts))
    return sorted(ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file())


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = [path for path in tracked("*.py") if PACKAGE in path.parents]
MODULES = [module_name(path) for path in SOURCES]


def imported_modules(path):
    """Every moecomm module that the file imports, anywhere in it, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "moecomm":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "moecomm":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in MODULES or name == "moecomm._C" else node.module), node.lineno


def layer(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_module_has_a_layer():
    unknown = sorted({layer(module) for module in MODULES} - set(LEVEL) - {"", "__main__"})
    assert not unknown, f"say in LAYERS where these belong: {unknown}"


def test_imports_only_go_down():
    wrong = []
    for path, module in zip(SOURCES, MODULES, strict=True):
        if layer(module) in {"", "__main__"}:
            continue  # the package's front door names what is public
        level = LEVEL.get(layer(module), len(LAYERS))
        for imported, line in imported_modules(path):
            # The bare package is the public face: for users and for the layers that act as users.
            above = LEVEL["communicator"] if imported == "moecomm" else LEVEL.get(layer(imported), 0)
            if above > level:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_integrations():
    users = [
        m
        for path, m in zip(SOURCES, MODULES, strict=True)
        for i, _ in imported_modules(path)
        if layer(i) == "integrations"
    ]
    assert all(layer(module) == "integrations" for module in users), users


def test_only_its_registry_knows_a_transport_a_codec_or_a_kernel_by_name():
    wrong = []
    for path, module in zip(SOURCES, MODULES, strict=True):
        for imported, line in imported_modules(path):
            parts = imported.split(".")
            if len(parts) < 3 or parts[1] not in CONCRETE or layer(module) in {parts[1], "testing"}:
                continue
            if parts[2] not in CONCRETE[parts[1]]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} imports {imported}")
    assert not wrong, "\n".join(wrong)


def exported(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]:
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__main__")])
def test_exports_are_listed_sorted_and_there(module):
    path = SOURCES[MODULES.index(module)]
    names = exported(path)
    if names is None:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        public = [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
        assert not public, f"{module} defines {public} and has no __all__"
        return
    in_order = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert names == in_order, f"__all__ of {module} must be sorted, constants, classes, functions: {in_order}"
    if module.startswith("moecomm.kernels.triton."):
        pytest.importorskip("triton", reason="Triton is not installed")
    loaded = importlib.import_module(module)
    missing = [name for name in names if name not in vars(loaded)]
    assert not missing, f"__all__ of {module} names what is not there: {missing}"


def test_files_are_short():
    files = tracked("*.py", "*.cc", "*.h", "*.cu", "*.cuh", "*.pyi")
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in files}
    long = [f"{path.relative_to(ROOT)}: {length} lines" for path, length in lengths.items() if length > 400]
    assert not long, long


def test_only_what_speaks_to_people_prints():
    wrong = []
    for path, module in zip(SOURCES, MODULES, strict=True):
        if layer(module) in SPEAKS_TO_PEOPLE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def test_code_is_ascii_and_has_no_leftovers():
    wrong = []
    leftover = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in tracked("*.py", "*.cc", "*.h", "*.cu", "*.cuh", "*.pyi"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.isascii() or (leftover.search(line) and path != Path(__file__)):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def anchors(path):
    """The anchors of a page's headings, as hosts make them."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    broken = []
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # another site: not ours to keep alive
        name, _, anchor = target.partition("#")
        linked = page if not name else (page.parent / name).resolve()
        if not linked.exists():
            broken.append(target)
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            broken.append(f"{target} (no such heading)")
    assert not broken, broken
