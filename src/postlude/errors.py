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


class TargetNotFound(PostludeError):
    """What a command was asked to work on can't be had."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(
            f"Cannot use {target!r}: {reason}. Expected package.module:name or path/to/file.py:name, where calling name()"
            " returns the model or function and the arguments to call it with, or a list of several sets of arguments, each"
            " a tuple or a dict: return model, x  or  return model, [(x,), {'x': longer}]"
        )


class CheckError(PostludeError):
    """There is nothing to check, or the model fails by itself."""


class CaseError(PostludeError):
    """A size, an epilogue or a line of a CSV that says nothing that could be measured."""


class DatabaseUnusable(PostludeError):
    """The tuning database can't be read or written."""

    def __init__(self, path: object, reason: object) -> None:
        super().__init__(
            f"{path} can't be used: {reason}. A tuning database that this user may read and write was expected; set"
            " POSTLUDE_TUNING_DB to use another file, or POSTLUDE_CACHE_DIR to move all caches."
        )


class FileUnusable(PostludeError):
    """A file that entries should come from or go to can't be read or written."""

    def __init__(self, path: object, reason: object, expected: str) -> None:
        super().__init__(f"{path} can't be used: {reason}. Name {expected}.")


class MeasurementFailed(PostludeError):
    """Nothing could be measured: Inductor's code for the nodes, with which all is compared, did not run, or memory was short."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"it could not be measured: {type(error).__name__}: {error}")


class ToolchainRefused(PostludeError):
    """The installed CuTe DSL or QuACK does not compile kernels that compute what they should."""

    def __init__(self, reason: str, installed: str, tested: str) -> None:
        super().__init__(
            f"The CUDA kernels of this installation ({installed}) failed their self-test: {reason}. Versions that were tested:"
            f" {tested}. Install those: pip install 'postlude[cuda]'. Until then the `cute` target is not used."
        )


class SpecError(PostludeError, ValueError):
    """A shape spec says something that makes no sense, or not about this function."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"In a shape spec: {found}; expected {expected}.")


class ShapeViolation(PostludeError, ValueError):
    """A call breaks the spec of the function that is called.

    Attributes:
        argument: what is wrong, as Python would reach it: ``x``, ``batch['ids']``.
        dimension: which dimension of the tensor, or None.
        value: the size or value that it has; for a wrong kind of thing, the name of its type; for nothing, None.
        rule: the rule that is broken.
    """

    def __init__(
        self,
        function: str,
        found: str,
        expected: str,
        *,
        argument: str,
        rule: str,
        dimension: int | None = None,
        value: object = None,
    ) -> None:
        super().__init__(
            f"{function} was called with {found}, where its shape spec expects {expected}. Pass arguments that keep to the spec,"
            " or change the spec if such calls are meant to work."
        )
        self.argument = argument
        self.dimension = dimension
        self.value = value
        self.rule = rule


class RecompileLimitExceeded(PostludeError):
    """A function that is watched would be compiled more often than was allowed."""

    def __init__(self, function: str, limit: int, told: list[str], remedy: str, spec: str) -> None:
        *earlier, last = told
        before = f" Recompilations before: {'; '.join(earlier)}." if earlier else ""
        advice = f"\n{remedy}" if remedy else ""
        declared = f"\nWhat varied, as a spec:\n{spec}" if spec else ""
        super().__init__(
            f"{function} would be compiled again, where limit={limit} recompilations are allowed. The cause: {last}.{before}"
            f"{advice}{declared}\nPrevent it in this way, or allow more."
        )


class OutputSizesUnknown(PostludeError):
    """Which parts of a bucketed function's results come from padding can't be found out."""

    def __init__(self, function: str, found: str) -> None:
        super().__init__(
            f"The results of {function}, which is called with padded arguments, can't be cut back: there was {found}. Say what"
            " sizes they have: bucketed(..., outputs=...), with the variables of the spec."
        )
