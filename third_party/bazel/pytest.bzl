"""Tests that pytest runs."""

def pytest_test(name, srcs, deps, **kwargs):
    """A py_test that runs pytest on `srcs`."""
    native.py_test(
        name = name,
        srcs = srcs + ["//third_party/bazel:pytest_main.py"],
        # Bazel does not see .venv; what is installed there changes with constraints.txt.
        data = kwargs.pop("data", []) + ["//:constraints.txt", "//:pyproject.toml"],
        main = "//third_party/bazel:pytest_main.py",
        deps = deps + ["//third_party/bazel:launch"],
        **kwargs
    )
