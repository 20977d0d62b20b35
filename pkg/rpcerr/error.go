package rpcerr

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// Domain is the ErrorInfo domain of every Braid error.
const Domain = "braid"

// MaxText bounds the message and each fact of an error, in bytes.
const MaxText = 1024

// maxDetails bounds each list of violations.
const maxDetails = 32

const reasonPrefix = "ERROR_REASON_"

// internalMessage is all that a client learns about an unmapped error.
const internalMessage = "internal error: the server logged the cause with this call's trace id"

// FieldViolation is one malformed field of a request.
type FieldViolation struct {
	// Field is the path in the request, for instance "records[3].key".
	Field string
	// Description says what is wrong and what is allowed.
	Description string
}

// Precondition is one condition of the server's state that doesn't hold.
type Precondition struct {
	// Type is the kind of condition, in capitals, for instance "FENCE".
	Type string
	// Subject is what it is about, for instance a partition's name.
	Subject string
	// Description says what would have to hold.
	Description string
}

// Resource is the thing that is missing or exists already.
type Resource struct {
	// Type is its kind, for instance "topic".
	Type string
	// Name is its resource name or label.
	Name string
}

// Quota is one limit that is reached.
type Quota struct {
	// Subject is who is limited, for instance a partition's name.
	Subject string
	// Description names the limit and its value.
	Description string
}

// Error is a Braid error on its way to or from a peer.
type Error struct {
	// Code tells how to react without knowing the reason.
	Code codes.Code
	// Reason is stable and for programs; UNSPECIFIED if the error doesn't come
	// from a Braid server, or from one that is newer than this code.
	Reason errorsv1.ErrorReason
	// Message is for people and may change.
	Message string
	// Metadata holds the facts that the reason's documentation names.
	Metadata map[string]string
	// RetryDelay is the least delay before another try that the server asks
	// for; 0 if it doesn't.
	RetryDelay time.Duration
	// Violations, Preconditions, Resource and Quotas are the details of the
	// kinds of error that have them.
	Violations    []FieldViolation
	Preconditions []Precondition
	Resource      *Resource
	Quotas        []Quota

	cause error
}

// New makes an error; format and args are as for fmt.Sprintf.
func New(code codes.Code, reason errorsv1.ErrorReason, format string, args ...any) *Error {
	message := format
	if len(args) > 0 {
		message = fmt.Sprintf(format, args...)
	}
	return &Error{Code: code, Reason: reason, Message: message}
}

// With adds a fact. Values are printed as fmt.Sprint does.
func (e *Error) With(key string, value any) *Error {
	if e.Metadata == nil {
		e.Metadata = map[string]string{}
	}
	if s, ok := value.(string); ok {
		e.Metadata[key] = s
	} else {
		e.Metadata[key] = fmt.Sprint(value)
	}
	return e
}

// WithRetry adds a retry hint.
func (e *Error) WithRetry(delay time.Duration) *Error {
	e.RetryDelay = delay
	return e
}

// WithField adds a field violation.
func (e *Error) WithField(field, description string) *Error {
	e.Violations = append(e.Violations, FieldViolation{field, description})
	return e
}

// WithPrecondition adds a condition that doesn't hold.
func (e *Error) WithPrecondition(kind, subject, description string) *Error {
	e.Preconditions = append(e.Preconditions, Precondition{kind, subject, description})
	return e
}

// WithResource names the thing the error is about.
func (e *Error) WithResource(kind, name string) *Error {
	e.Resource = &Resource{kind, name}
	return e
}

// WithQuota adds a limit that is reached.
func (e *Error) WithQuota(subject, description string) *Error {
	e.Quotas = append(e.Quotas, Quota{subject, description})
	return e
}

// WithCause keeps the original error for this process: errors.Is and As see
// it, the peer doesn't.
func (e *Error) WithCause(err error) *Error {
	e.cause = err
	return e
}

// Error implements error: code, reason and message.
func (e *Error) Error() string {
	if e.Reason == errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return e.Code.String() + ": " + e.Message
	}
	return e.Code.String() + " " + ReasonName(e.Reason) + ": " + e.Message
}

// Unwrap returns the cause, if this process knows it.
func (e *Error) Unwrap() error { return e.cause }

// Is makes errors.Is(err, context.Canceled) and (…, context.DeadlineExceeded)
// work on errors that came over the wire.
func (e *Error) Is(target error) bool {
	switch target {
	case context.Canceled:
		return e.Code == codes.Canceled
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	}
	return false
}

// Int returns a numeric fact.
func (e *Error) Int(key string) (int64, bool) {
	n, err := strconv.ParseInt(e.Metadata[key], 10, 64)
	return n, err == nil
}

// GRPCStatus gives the error to gRPC, with its details.
func (e *Error) GRPCStatus() *status.Status {
	st := status.New(e.Code, cut(e.Message))
	if e.Code == codes.OK {
		return status.New(codes.Internal, internalMessage) // an error is never OK
	}
	var details []protoadapt.MessageV1
	if e.Reason != errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		info := &errdetails.ErrorInfo{Reason: ReasonName(e.Reason), Domain: Domain, Metadata: map[string]string{}}
		for _, key := range slices.Sorted(maps.Keys(e.Metadata)) {
			if len(info.Metadata) == maxDetails {
				break
			}
			info.Metadata[cut(key)] = cut(e.Metadata[key])
		}
		details = append(details, info)
	}
	if e.RetryDelay > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryDelay)})
	}
	if len(e.Violations) > 0 {
		d := &errdetails.BadRequest{}
		for _, v := range head(e.Violations) {
			d.FieldViolations = append(d.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: cut(v.Field), Description: cut(v.Description)})
		}
		details = append(details, d)
	}
	if len(e.Preconditions) > 0 {
		d := &errdetails.PreconditionFailure{}
		for _, p := range head(e.Preconditions) {
			d.Violations = append(d.Violations, &errdetails.PreconditionFailure_Violation{Type: cut(p.Type), Subject: cut(p.Subject), Description: cut(p.Description)})
		}
		details = append(details, d)
	}
	if e.Resource != nil {
		details = append(details, &errdetails.ResourceInfo{ResourceType: cut(e.Resource.Type), ResourceName: cut(e.Resource.Name), Description: cut(e.Message)})
	}
	if len(e.Quotas) > 0 {
		d := &errdetails.QuotaFailure{}
		for _, q := range head(e.Quotas) {
			d.Violations = append(d.Violations, &errdetails.QuotaFailure_Violation{Subject: cut(q.Subject), Description: cut(q.Description)})
		}
		details = append(details, d)
	}
	full, err := st.WithDetails(details...)
	if err != nil {
		return st // the code and the sentence are worth more than no answer
	}
	return full
}

func head[T any](list []T) []T { return list[:min(len(list), maxDetails)] }

// cut shortens text to MaxText bytes and replaces invalid UTF-8, which
// protobuf would refuse.
func cut(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= MaxText {
		return text
	}
	const mark = "…"
	end := MaxText - len(mark)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + mark
}

// ReasonName is a reason as it is on the wire: without its prefix.
func ReasonName(reason errorsv1.ErrorReason) string {
	return strings.TrimPrefix(reason.String(), reasonPrefix)
}

// ParseReason reads a reason from the wire; UNSPECIFIED if it is unknown.
func ParseReason(name string) errorsv1.ErrorReason {
	return errorsv1.ErrorReason(errorsv1.ErrorReason_value[reasonPrefix+name])
}

// From gives the typed error back: the first *[Error] in err's chain, else
// one made from a gRPC status in it, else one with the code of a context
// error. It returns false if err is nil or none of these.
func From(err error) (*Error, bool) {
	if err == nil {
		return nil, false
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return e, true
	}
	if s := (interface{ GRPCStatus() *status.Status })(nil); errors.As(err, &s) {
		return fromStatus(s.GRPCStatus(), err), true
	}
	if st := status.FromContextError(err); st.Code() != codes.Unknown {
		return fromStatus(st, err), true
	}
	return nil, false
}

func fromStatus(st *status.Status, cause error) *Error {
	e := &Error{Code: st.Code(), Message: st.Message(), cause: cause}
	for _, detail := range st.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == Domain {
				e.Reason = ParseReason(d.GetReason())
				e.Metadata = maps.Clone(d.GetMetadata())
			}
		case *errdetails.RetryInfo:
			e.RetryDelay = max(d.GetRetryDelay().AsDuration(), 0)
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				e.Violations = append(e.Violations, FieldViolation{v.GetField(), v.GetDescription()})
			}
		case *errdetails.PreconditionFailure:
			for _, v := range d.GetViolations() {
				e.Preconditions = append(e.Preconditions, Precondition{v.GetType(), v.GetSubject(), v.GetDescription()})
			}
		case *errdetails.ResourceInfo:
			e.Resource = &Resource{d.GetResourceType(), d.GetResourceName()}
		case *errdetails.QuotaFailure:
			for _, v := range d.GetViolations() {
				e.Quotas = append(e.Quotas, Quota{v.GetSubject(), v.GetDescription()})
			}
		}
	}
	return e
}

// Reason is the reason in err's chain, UNSPECIFIED if there is none.
func Reason(err error) errorsv1.ErrorReason {
	if e, ok := From(err); ok {
		return e.Reason
	}
	return errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED
}

// Has tells whether err carries the reason.
func Has(err error, reason errorsv1.ErrorReason) bool { return Reason(err) == reason }

// ToStatus is the status to answer with. mapped is false if nothing in err's
// chain says how to answer: the status is then INTERNAL with a fixed sentence,
// and the caller must log err, because the client learns nothing of it.
func ToStatus(err error) (st *status.Status, mapped bool) {
	if err == nil {
		return status.New(codes.OK, ""), true
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.GRPCStatus(), true
	}
	if s := (interface{ GRPCStatus() *status.Status })(nil); errors.As(err, &s) && s.GRPCStatus().Code() != codes.OK {
		return s.GRPCStatus(), true
	}
	if st := status.FromContextError(err); st.Code() != codes.Unknown {
		return status.New(st.Code(), cut(st.Message())), true
	}
	return Internal(err).GRPCStatus(), false
}
