"""Tests that pytest runs."""

def pytest_test(name, srcs, deps, data = [], tags = [], **kwargs):
    """A py_test that runs pytest on `srcs`. Importing torch or tensorflow is an error there, unless it has the tag "framework"."""
    plugins = [] if "framework" in tags else ["-p", "third_party.bazel.without_frameworks"]
    native.py_test(
        name = name,
        srcs = srcs + ["//third_party/bazel:pytest_main.py"],
        args = plugins,
        # Bazel does not see .venv; what is installed there changes with constraints.txt.
        data = data + ["//:constraints.txt", "//:pyproject.toml"],
        main = "//third_party/bazel:pytest_main.py",
        tags = tags,
        deps = deps + ["//third_party/bazel:launch", "//third_party/bazel:without_frameworks"],
        **kwargs
    )
