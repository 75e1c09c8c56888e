"""What the S3 library and the S3 servers raise, in our words: what failed, why, what to do, and the right exit code.

A write that got no answer may have been carried out: that is OutcomeUnknownError and nothing else. A refusal that
says so in S3's own words was not carried out. A test walks every class of botocore.exceptions.
"""

import http.client
from collections.abc import Mapping
from typing import Any, Final

import urllib3.exceptions
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.s3 import contact
from weighbridge.registry.remotes.s3.contact import Rule

CAUGHT: Final = (
    boto.BotoCoreError,
    boto.ClientError,
    boto.UndefinedModelAttributeError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    RecursionError,
)
"""Everything a request can raise that is not a fault of our own."""

SENSELESS: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, Warning)
"""What the library's parser raises about an answer that was damaged; see `is_senseless`."""

SLOW: Final = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequests",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "PriorRequestNotComplete",
        "429",
    }
)
"""Codes that ask for fewer requests; nothing was carried out."""


_PARSERS: Final = frozenset({f"botocore.{name}" for name in ("parsers", "handlers", "httpchecksum", "awsrequest")})


_CREDENTIALS: Final = "give credentials as for the AWS command line: a profile, AWS_ACCESS_KEY_ID or an instance role"
_LOGIN: Final = "log in again (aws sso login, aws login), then repeat"
_CONFIG: Final = "correct ~/.aws/config, the AWS_* variables, or the keys of this remote in weighbridge.toml"
_NETWORK: Final = contact.NETWORK
_AGAIN: Final = contact.AGAIN
_REINSTALL: Final = "pip install --upgrade boto3"

CLASSES: Final[Mapping[type[BaseException], Rule]] = {
    # No connection came about: nothing was carried out.
    boto.EndpointConnectionError: Rule("unreachable", None, _NETWORK),
    boto.ConnectTimeoutError: Rule("unreachable", "nobody answers at that address", _NETWORK),
    boto.ProxyConnectionError: Rule("unreachable", None, "correct HTTPS_PROXY, or add the store to NO_PROXY"),
    boto.ConnectionError: Rule("unreachable", None, _NETWORK),
    boto.SSLError: Rule("tls", None, "name the store's certificate authority: ca = /path.pem, or AWS_CA_BUNDLE"),
    # The connection broke: a write may have been carried out.
    boto.ConnectionClosedError: Rule("lost", "the connection was closed without an answer", _AGAIN),
    boto.ReadTimeoutError: Rule("lost", "no answer came in time", _AGAIN),
    boto.ResponseStreamingError: Rule("lost", "the answer broke off", _AGAIN),
    boto.IncompleteReadError: Rule("lost", "the answer broke off", _AGAIN),
    boto.HTTPClientError: Rule("lost", None, _AGAIN),
    boto.ChecksumError: Rule("lost", "the bytes were damaged on their way", _AGAIN),
    boto.FlexibleChecksumError: Rule("lost", "the bytes were damaged on their way", _AGAIN),
    boto.CapacityNotAvailableError: Rule("slow", None, _AGAIN),
    # In whose name.
    boto.NoCredentialsError: Rule("denied", "no credentials were found", _CREDENTIALS),
    boto.PartialCredentialsError: Rule("denied", None, _CREDENTIALS),
    boto.CredentialRetrievalError: Rule("denied", None, _CREDENTIALS),
    boto.UnknownCredentialError: Rule("denied", None, _CREDENTIALS),
    boto.MetadataRetrievalError: Rule("denied", None, _CREDENTIALS),
    boto.NoAuthTokenError: Rule("denied", None, _LOGIN),
    boto.TokenRetrievalError: Rule("denied", None, _LOGIN),
    boto.UnknownTokenProviderError: Rule("denied", None, _LOGIN),
    boto.SSOError: Rule("denied", None, _LOGIN),
    boto.LoginError: Rule("denied", None, _LOGIN),
    boto.RefreshWithMFAUnsupportedError: Rule("denied", None, "use a role that needs no second factor for a service"),
    # How this machine is set up.
    boto.ProfileNotFound: Rule("usage", None, "name a profile that stands in ~/.aws/config"),
    boto.ConfigNotFound: Rule("usage", None, _CONFIG),
    boto.ConfigParseError: Rule("usage", None, _CONFIG),
    boto.InvalidConfigError: Rule("usage", None, _CONFIG),
    boto.InvalidChecksumConfigError: Rule("usage", None, _CONFIG),
    boto.InvalidDefaultsMode: Rule("usage", None, _CONFIG),
    boto.InvalidEndpointDiscoveryConfigurationError: Rule("usage", None, _CONFIG),
    boto.InvalidIMDSEndpointError: Rule("usage", None, _CONFIG),
    boto.InvalidIMDSEndpointModeError: Rule("usage", None, _CONFIG),
    boto.InvalidProxiesConfigError: Rule("usage", None, _CONFIG),
    boto.InvalidRetryConfigurationError: Rule("usage", None, _CONFIG),
    boto.InvalidS3AddressingStyleError: Rule("usage", None, 'write addressing = "path" or "virtual"'),
    boto.InvalidS3UsEast1RegionalEndpointConfigError: Rule("usage", None, _CONFIG),
    boto.InvalidSTSRegionalEndpointsConfigError: Rule("usage", None, _CONFIG),
    boto.InvalidRegionError: Rule("usage", None, "write region as your store names it, such as eu-central-1"),
    boto.UnknownRegionError: Rule("usage", None, "write region as your store names it, such as eu-central-1"),
    boto.ServiceNotInRegionError: Rule("usage", None, "write region as your store names it, such as eu-central-1"),
    boto.BaseEndpointResolverError: Rule(
        "usage", None, "write the region of this remote, or its endpoint as https://host"
    ),
    boto.EndpointProviderError: Rule("usage", None, "write the region of this remote, or its endpoint as https://host"),
    boto.InvalidEndpointConfigurationError: Rule("usage", None, "write endpoint as https://host"),
    boto.InvalidDNSNameError: Rule("usage", None, 'write addressing = "path", or rename the bucket'),
    boto.InvalidHostLabelError: Rule("usage", None, 'write addressing = "path", or rename the bucket'),
    boto.UnsupportedOutpostResourceError: Rule("usage", None, "name a bucket, not a resource of another kind"),
    boto.UnsupportedS3AccesspointConfigurationError: Rule("usage", None, _CONFIG),
    boto.UnsupportedS3ArnError: Rule("usage", None, "name a bucket, not a resource of another kind"),
    boto.UnsupportedS3ConfigurationError: Rule("usage", None, _CONFIG),
    boto.UnsupportedS3ControlArnError: Rule("usage", None, "name a bucket, not a resource of another kind"),
    boto.UnsupportedS3ControlConfigurationError: Rule("usage", None, _CONFIG),
    boto.UnknownSignatureVersionError: Rule("usage", None, _CONFIG),
    boto.UnsupportedSignatureVersionError: Rule("usage", None, _CONFIG),
    # The library itself is broken or too old.
    boto.DataNotFoundError: Rule("broken", None, _REINSTALL),
    boto.ApiVersionNotFoundError: Rule("broken", None, _REINSTALL),
    boto.MissingDependencyException: Rule("broken", None, _REINSTALL),
    boto.MD5UnavailableError: Rule("broken", None, "use a Python that is allowed to compute MD5"),
    boto.UndefinedModelAttributeError: Rule("broken", None, _REINSTALL),
    boto.UnknownServiceStyle: Rule("broken", None, _REINSTALL),
    boto.UnsupportedServiceProtocolsError: Rule("broken", None, _REINSTALL),
    boto.ParamValidationError: Rule("broken", None, _REINSTALL),
    boto.ValidationError: Rule("broken", None, _REINSTALL),
    boto.MissingParametersError: Rule("broken", None, _REINSTALL),
    # The server's answers do not make sense.
    boto.PaginationError: Rule("foreign", None, "correct the endpoint: what answers there is not S3"),
    boto.EventStreamError: Rule("foreign", None, "correct the endpoint: what answers there is not S3"),
    ResponseParserError: Rule("foreign", "its answer is not one of S3", "correct the endpoint of this remote"),
    # Nothing here can raise these; whoever meets one has found a fault of ours.
    boto.AliasConflictParameterError: Rule("bug", None, None),
    boto.AwsChunkedWrapperError: Rule("bug", None, None),
    boto.InvalidExpressionError: Rule("bug", None, None),
    boto.OperationNotPageableError: Rule("bug", None, None),
    boto.StubResponseError: Rule("bug", None, None),
    boto.UnknownClientMethodError: Rule("bug", None, None),
    boto.UnseekableStreamError: Rule("bug", None, None),
    boto.WaiterConfigError: Rule("bug", None, None),
    boto.WaiterError: Rule("bug", None, None),
    # What leaks from the layers below while a body is read.
    urllib3.exceptions.HTTPError: Rule("lost", "the answer broke off", _AGAIN),
    http.client.HTTPException: Rule("lost", "the answer broke off", _AGAIN),
    OSError: Rule("lost", None, _AGAIN),
    # The library follows a redirect by asking for the bucket's region, which is redirected, which it follows.
    RecursionError: Rule("foreign", "it only points elsewhere, as a login page does", "correct the endpoint"),
    **dict.fromkeys(SENSELESS, Rule("lost", "its answer makes no sense", _AGAIN)),
}
"""Class -> meaning; a class that is not here has that of its nearest ancestor."""

_CLOCK: Final = "set this machine's clock (timedatectl set-ntp true), then repeat"
_RIGHTS: Final = "let the bucket's owner grant the action (docs/policies), or use other credentials"
_REGION: Final = "write the bucket's region into this remote: region = ..."
_SETTINGS: Final = "correct bucket, region and addressing of this remote"

CODES: Final[Mapping[str, Rule]] = {
    "NoSuchKey": Rule("missing", None, None),
    "NoSuchVersion": Rule("missing", None, None),
    "NoSuchBucket": Rule("no-bucket", "there is no bucket of that name", "correct the URL, or let somebody create it"),
    "NoSuchUpload": Rule("gone", "the unfinished upload was finished or given up by somebody else", _AGAIN),
    # Rights.
    "AccessDenied": Rule("denied", None, _RIGHTS),
    "AllAccessDisabled": Rule("denied", None, _RIGHTS),
    "AccountProblem": Rule("denied", None, _RIGHTS),
    "AccessForbidden": Rule("denied", None, _RIGHTS),
    "Forbidden": Rule("denied", None, _RIGHTS),
    "UnauthorizedAccess": Rule("denied", None, _RIGHTS),
    "NotSignedUp": Rule("denied", None, _RIGHTS),
    "InvalidPayer": Rule("denied", None, _RIGHTS),
    "AccessPointNotOwnedByYou": Rule("denied", None, _RIGHTS),
    "InvalidAccessKeyId": Rule("denied", "the store does not know this access key", _CREDENTIALS),
    "SignatureDoesNotMatch": Rule("denied", "the secret key is wrong, or a proxy changes the requests", _CREDENTIALS),
    "CredentialsNotSupported": Rule("denied", None, _CREDENTIALS),
    "InvalidSecurity": Rule("denied", None, _CREDENTIALS),
    "MissingSecurityHeader": Rule("denied", None, _CREDENTIALS),
    "MissingAuthenticationToken": Rule("denied", None, _CREDENTIALS),
    "AuthFailure": Rule("denied", None, _CREDENTIALS),
    "UnrecognizedClientException": Rule("denied", None, _CREDENTIALS),
    "InvalidClientTokenId": Rule("denied", None, _CREDENTIALS),
    "InvalidToken": Rule("denied", "the session token is not valid", _LOGIN),
    "ExpiredToken": Rule("denied", "the session has expired", _LOGIN),
    "ExpiredTokenException": Rule("denied", "the session has expired", _LOGIN),
    "TokenRefreshRequired": Rule("denied", "the session has expired", _LOGIN),
    "RequestExpired": Rule("denied", "the request reached the store too late, or a clock is wrong", _CLOCK),
    "RequestTimeTooSkewed": Rule("denied", "the clocks of this machine and of the store differ too much", _CLOCK),
    "KMS.DisabledException": Rule("denied", "the key of the encryption is disabled", _RIGHTS),
    "KMS.NotFoundException": Rule("usage", "there is no such encryption key", "correct encryption of this remote"),
    "KMS.KMSInvalidStateException": Rule("denied", "the key of the encryption cannot be used now", _RIGHTS),
    "InvalidObjectState": Rule("denied", "the object lies in an archive class", "restore it, and keep versions out"),
    # The wrong place.
    "PermanentRedirect": Rule("usage", "the bucket lies in another region", _REGION),
    "Redirect": Rule("usage", "the bucket lies in another region", _REGION),
    "TemporaryRedirect": Rule("usage", "the bucket lies in another region", _REGION),
    "AuthorizationHeaderMalformed": Rule("usage", None, _REGION),
    "AuthorizationQueryParametersError": Rule("usage", None, _REGION),
    "IllegalLocationConstraintException": Rule("usage", None, _REGION),
    "IncorrectEndpoint": Rule("usage", None, _SETTINGS),
    "InvalidBucketName": Rule("usage", None, _SETTINGS),
    "InvalidURI": Rule("usage", None, _SETTINGS),
    "InvalidHostHeader": Rule("usage", None, _SETTINGS),
    "KeyTooLongError": Rule("usage", None, "use a shorter prefix or shorter file names"),
    "KeyTooLong": Rule("usage", None, "use a shorter prefix or shorter file names"),
    "InvalidStorageClass": Rule("usage", None, "correct storage_class of this remote"),
    "InvalidEncryptionAlgorithmError": Rule("usage", None, "correct encryption of this remote"),
    "ServerSideEncryptionConfigurationNotFoundError": Rule("usage", None, "correct encryption of this remote"),
    "InvalidArgument": Rule("refused", None, _SETTINGS),
    "InvalidRequest": Rule("refused", None, _SETTINGS),
    "BadRequest": Rule("refused", None, _SETTINGS),
    "MethodNotAllowed": Rule("refused", None, "use a store that offers what docs/remotes-s3.md lists"),
    "NotImplemented": Rule("refused", None, "use a store that offers what docs/remotes-s3.md lists"),
    "XNotImplemented": Rule("refused", None, "use a store that offers what docs/remotes-s3.md lists"),
    "UnsupportedOperation": Rule("refused", None, "use a store that offers what docs/remotes-s3.md lists"),
    "MissingContentLength": Rule("refused", None, "use a store that offers what docs/remotes-s3.md lists"),
    "EntityTooLarge": Rule("refused", None, "the store takes no object of this size"),
    "EntityTooSmall": Rule("stale", None, _AGAIN),
    "MalformedXML": Rule("refused", None, "use a store that offers what docs/remotes-s3.md lists"),
    "ObjectLockConfigurationNotFoundError": Rule("refused", None, None),
    # Create-only writes.
    "PreconditionFailed": Rule("exists", None, None),
    "ObjectAlreadyExists": Rule("exists", None, None),
    "ConditionalRequestConflict": Rule("conflict", "another request for the same key was under way", _AGAIN),
    "OperationAborted": Rule("conflict", "another request for the same key was under way", _AGAIN),
    "ObjectAlreadyInActiveTierError": Rule("refused", None, None),
    # Bytes.
    "BadDigest": Rule("stale", "the bytes were damaged on their way; the store refused them", _AGAIN),
    "InvalidDigest": Rule("stale", "the checksum was damaged on its way; the store refused it", _AGAIN),
    "XAmzContentSHA256Mismatch": Rule("stale", "the bytes were damaged on their way; the store refused them", _AGAIN),
    "XAmzContentChecksumMismatch": Rule("stale", "the bytes were damaged on their way; the store refused them", _AGAIN),
    "InvalidChecksum": Rule("stale", "the bytes were damaged on their way; the store refused them", _AGAIN),
    "IncompleteBody": Rule("stale", "the request broke off on its way", _AGAIN),
    "RequestTimeout": Rule("stale", "the request took too long on its way", _AGAIN),
    "InvalidPart": Rule("stale", "a part of the upload was replaced by somebody else", _AGAIN),
    "InvalidPartOrder": Rule("stale", "a part of the upload is missing", _AGAIN),
    "InvalidRange": Rule("range", None, None),
    # Room.
    "QuotaExceeded": Rule("full", None, "free some space or raise the quota of the store, then repeat"),
    "XMinioStorageFull": Rule("full", None, "free some space on the store, then repeat"),
    "XMinioAdminBucketQuotaExceeded": Rule("full", None, "raise the quota of the bucket, then repeat"),
    "InsufficientStorage": Rule("full", None, "free some space on the store, then repeat"),
    "StorageFull": Rule("full", None, "free some space on the store, then repeat"),
    # Trouble over there; a write may have been carried out all the same.
    "InternalError": Rule("trouble", None, _AGAIN),
    "InternalFailure": Rule("trouble", None, _AGAIN),
    "InternalServerError": Rule("trouble", None, _AGAIN),
    "ServiceUnavailable": Rule("trouble", None, _AGAIN),
    "ServiceFailure": Rule("trouble", None, _AGAIN),
    "Unavailable": Rule("trouble", None, _AGAIN),
    "RequestTimeoutException": Rule("trouble", None, _AGAIN),
    "XMinioServerNotInitialized": Rule("trouble", None, _AGAIN),
    **dict.fromkeys(SLOW, Rule("slow", "the store asks for fewer requests", _AGAIN)),
}
"""S3's own error codes -> meaning. A code that is not here is judged by its HTTP status."""


def translate(
    error: BaseException,
    what: str,
    place: str,
    *,
    write: bool = False,
    first: bool = False,
    told: Mapping[str, Any] | None = None,
) -> errors.WeighbridgeError:
    """Return our error for what a request raised; `what` is "cannot do this", `place` the remote's URL.

    `write` means that repeating is not harmless: no answer then is OutcomeUnknownError. `first` means that the endpoint
    never answered anything: what is odd about it is then what it is, and not damage on the way.
    """
    if isinstance(error, boto.ClientError) and not isinstance(error, boto.EventStreamError):
        return _from_answer(error, what, place, write=write)
    rule = next((CLASSES[kind] for kind in type(error).__mro__ if kind in CLASSES), Rule("bug", None, None))
    if isinstance(error, boto.SSLError):
        rule = contact.tls(error, first=first)
    elif isinstance(error, boto.EndpointConnectionError):
        rule = rule._replace(why=contact.no_connection(error))
    elif first:
        lost = rule._replace(fix=f"repeat, or {contact.PORT}") if rule.kind == "lost" else rule
        rule = contact.stranger(error) or lost
    return _make(rule.kind, what, rule.why or contact.plain(error), rule.fix, place, write=write, data=dict(told or {}))


def is_senseless(error: BaseException) -> bool:
    """Tell whether an error arose while an answer was parsed; anywhere else it would be a fault of ours."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in _PARSERS:
            return True
        trace = trace.tb_next
    return False


def code_of(error: BaseException) -> str:
    """Return S3's code of an error that a server sent, its HTTP status where it sent none, else nothing."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def _from_answer(error: boto.ClientError, what: str, place: str, *, write: bool) -> errors.WeighbridgeError:
    answer = error.response
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    code = code_of(error) or str(status)
    said = str(answer.get("Error", {}).get("Message") or "")
    silent = code == str(status) and not error.operation_name.startswith("Head")  # an answer to HEAD has no words
    rule = CODES.get(code) or _by_status(code, status, write=write, silent=silent)
    why = rule.why or (f"{said.rstrip('.')} ({code})" if said and said != code else f"the store answers {code}")
    data = {"s3_code": code, "status": status}
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    after = headers.get("retry-after", "")
    if str(after).isdecimal():
        data["retry_after"] = int(after)
    fix = rule.fix
    region = str(headers.get("x-amz-bucket-region") or answer.get("Error", {}).get("Region") or "")
    if fix == _REGION and region:
        fix = f'write the bucket\'s region into this remote: region = "{shown(region)}"'
    return _make(rule.kind, what, shown(why), fix, place, write=write, data=data)


def _by_status(code: str, status: int, *, write: bool, silent: bool) -> Rule:
    """Judge an answer by its status. A `silent` one lacks S3's own words: something else may have given it."""
    if status in {401, 403}:
        return Rule("denied", f"the store refuses it ({code})", _RIGHTS)
    if silent and write and 400 <= status < 500:
        return Rule("trouble", f"the answer {code} is not in the words of S3", _AGAIN)
    if silent and (status == 404 or status in {400, 405, 406, 410, 411, 414, 415, 421}):
        return Rule("foreign", f"the answer {code} is not in the words of S3", "correct the endpoint of this remote")
    if status == 404:
        return Rule("missing", None, None)
    if status == 412:
        return Rule("exists", None, None)
    if status == 416:
        return Rule("range", None, None)
    if status == 409:
        return Rule("conflict", None, _AGAIN)
    if status == 503 and not write and silent:
        return Rule(
            "slow", f"the answer {code} is not in the words of S3: it may be another's than the store's", _AGAIN
        )
    if status == 503 and not write:  # to HEAD even SlowDown has no words
        return Rule("slow", "the store asks for fewer requests", _AGAIN)
    if status == 507:
        return Rule("full", None, "free some space on the store, then repeat")
    if 300 <= status < 400:
        return Rule("usage", f"the store points elsewhere ({code})", _REGION)
    if status >= 500 or status < 200:
        return Rule("trouble", None, _AGAIN)
    return Rule("refused", None, _SETTINGS)


def _make(
    kind: str,
    what: str,
    why: str,
    fix: str | None,
    place: str,
    *,
    write: bool,
    data: Mapping[str, Any] | None = None,
) -> errors.WeighbridgeError:
    given = dict(data or {})
    remote = shown(place)
    there = what if remote in what else f"{what} at {remote}"
    match kind:
        case "missing":
            return errors.MissingError(what, why=f"{remote} holds nothing under this key", **given)
        case "no-bucket":
            return errors.NotFoundError(f"there is no remote at {remote}", why=why, fix=fix, remote=place, **given)
        case "denied":
            return errors.DeniedError(there, why=why, fix=fix, remote=place, **given)
        case "usage" | "foreign":
            return errors.UsageError(
                f"{remote} cannot be used as it is set up", why=why, fix=fix, remote=place, **given
            )
        case "unreachable" | "tls":
            return errors.UnreachableError(f"{remote} cannot be reached", why=why, fix=fix, remote=place, **given)
        case "slow":
            return errors.RetryableError(there, why=why, fix=fix, slow=True, **given)
        case "exists":
            return errors.ExistsError(what, why=f"{remote} holds an object of that key", **given)
        case "lost" | "trouble" | "conflict" if write:
            return errors.OutcomeUnknownError(there, why=why, fix=fix, **given)
        case "lost" | "trouble" | "conflict" | "stale" | "gone":
            return errors.RetryableError(there, why=why, fix=fix, kind=kind, **given)
        case "full":
            return errors.StorageFullError(what, why=f"{remote}: {why}", fix=fix, **given)
        case "broken":
            return errors.WeighbridgeError(there, why=why, fix=fix, **given)
        case "refused" | "range":
            return errors.WeighbridgeError(
                what, why=f"{remote} refuses the request: {why}", fix=fix, kind=kind, **given
            )
    return errors.BugError(what, why=why, fix="report it, with what you did")
