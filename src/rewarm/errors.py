"""The exception tree. A miss is a value, never an exception: these come from opening and from misuse only."""


class RewarmError(Exception):
    """Base of every error that Rewarm raises on purpose."""


class ConfigError(RewarmError, ValueError):
    """Something that the caller wrote is wrong: a URL, an option, a file, an argument."""


class NamespaceMismatch(ConfigError):
    """Two descriptions of one namespace disagree."""


class FormatError(ConfigError):
    """The files of a pool are of another format, or not a pool at all."""


class PoolInUse(ConfigError):
    """Somebody else holds what was asked for."""


class StorageError(RewarmError):
    """The medium cannot be opened: no permission, no space, an I/O error."""


class MisuseError(RewarmError, RuntimeError):
    """A store handle was used in a way its contract forbids: after close, after fork, with bad keys."""
