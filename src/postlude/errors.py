"""Every error that a user can meet: one class each, with one message that says what happened, what was expected, what to do."""


class PostludeError(RuntimeError):
    """Base class of all errors raised by Postlude."""


class CompilerNotFound(PostludeError):
    """There is no C++ compiler, so the cpp target can't build kernels."""

    def __init__(self, looked_for: str) -> None:
        super().__init__(
            f"No C++ compiler: {looked_for}. Postlude compiles its CPU kernels when they are first needed. Install one"
            " (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`; macOS: `xcode-select --install`; anywhere:"
            " `pip install ziglang`), or set the environment variable CXX to its command."
        )


class CompilerFailed(PostludeError):
    """The compiler that was found does not do what every C++ compiler does."""

    def __init__(self, compiler: str, reason: str) -> None:
        super().__init__(
            f"The C++ compiler {compiler} could not be used: {reason or 'it gave no reason'}. A g++ (10 or later) or clang++"
            " (12 or later) that compiles C++20 was expected. Set the environment variable CXX to the command of another one."
        )


class KernelBuildError(PostludeError):
    """Generated code did not compile."""

    def __init__(self, source: str, command: str, errors: str) -> None:
        super().__init__(
            f"A generated kernel did not compile. The compiler's first errors:\n{errors}\nThe source is kept in {source};"
            f" the command was: {command}\nThis is a fault in Postlude or an unusual compiler: try another one through the"
            " environment variable CXX, and please report it with the source file."
        )
        self.source = source
        self.command = command


class KernelLoadError(PostludeError):
    """A compiled object could not be loaded into this process."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"The compiled kernel {path} could not be loaded: {reason}. An object built by this version of Postlude on"
            " this machine was expected. Remove the cache folder and run again; if it stays, look whether the"
            " folder is mounted 'noexec'."
        )


class DemoPackagesMissing(PostludeError):
    """The packages of the `demo` extra are not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"The demo needs the package {package!r}, which is not installed. Install what the demo needs:"
            " pip install 'postlude[demo]'"
        )
        self.package = package


class EnvironmentUnsupported(PostludeError):
    """torch.compile can't run here: this Python or this torch is not one that Postlude supports."""


class OptionError(PostludeError):
    """An option in ``torch.compile(..., options={...})`` has a value that it can't have."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(f"options={{{name!r}: {value!r}}}: expected {expected}. The README lists the options.")


class QuantizationError(PostludeError):
    """A tensor, a model or a scheme can't be quantised as it was asked for."""

    def __init__(self, happened: str, expected: str, remedy: str) -> None:
        super().__init__(f"{happened[:1].upper()}{happened[1:]}; expected {expected}. {remedy}.")


class ReportNotWritten(PostludeError):
    """A file that was asked for can't be written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"The report could not be written to {path}: {reason}. Name a file in a folder that exists and is writable."
        )
