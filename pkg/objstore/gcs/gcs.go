package gcs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"cloud.google.com/go/storage"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"
	htransport "google.golang.org/api/transport/http"

	"github.com/braidlog/braid/pkg/objstore"
)

// pageSize is the number of objects per page of a listing, the service's limit.
const pageSize = 1000

// Store is one bucket. Create it with [Open]. It is safe for concurrent use.
type Store struct {
	cfg       Config
	client    *storage.Client
	bucket    *storage.BucketHandle
	transport *http.Transport
}

var _ objstore.Store = (*Store)(nil)

// Open returns the store of cfg. It looks up credentials if the configuration
// asks for Google's service, and makes no request to the bucket: the first
// call tells whether it is there. The caller closes the store; ctx bounds only
// the opening.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open bucket: %w", err)
	}
	transport := newTransport(cfg)
	opts := []option.ClientOption{storage.WithJSONReads()}
	if cfg.Endpoint != "" {
		opts = append(opts,
			option.WithEndpoint(strings.TrimRight(cfg.Endpoint, "/")+"/storage/v1/"),
			option.WithHTTPClient(&http.Client{Transport: transport}))
	} else {
		authorized, err := htransport.NewTransport(context.WithoutCancel(ctx), transport,
			option.WithScopes(storage.ScopeReadWrite))
		if err != nil {
			return nil, fmt.Errorf("open bucket %s: credentials: %w", cfg.Bucket, err)
		}
		opts = append(opts, option.WithHTTPClient(&http.Client{Transport: authorized}))
	}
	client, err := storage.NewClient(context.WithoutCancel(ctx), opts...)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", cfg.Bucket, err)
	}
	client.SetRetry(storage.WithPolicy(storage.RetryNever))
	return &Store{cfg: cfg, client: client, bucket: client.Bucket(cfg.Bucket), transport: transport}, nil
}

// newTransport is HTTP/1.1 only: HTTP/2 would put all transfers on one TCP
// connection, where a large upload delays the small reads behind it.
func newTransport(cfg Config) *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: min(cfg.AttemptTimeout, 5*time.Second), KeepAlive: 30 * time.Second}).DialContext,
		Protocols:             protocols,
		MaxIdleConns:          cfg.MaxIdleConns,
		MaxIdleConnsPerHost:   cfg.MaxIdleConns,
		IdleConnTimeout:       90 * time.Second,
		TLSHandshakeTimeout:   min(cfg.AttemptTimeout, 5*time.Second),
		ExpectContinueTimeout: time.Second,
		DisableCompression:    true,
		// The defaults of 4 KiB cost a system call per 4 KiB of content.
		WriteBufferSize: 64 << 10,
		ReadBufferSize:  64 << 10,
	}
}

// Close releases the client and its idle connections.
func (s *Store) Close() error {
	err := s.client.Close()
	s.transport.CloseIdleConnections()
	return err
}

func invalid(op objstore.Op, name string, format string, args ...any) error {
	return &objstore.Error{Op: op, Name: name, Kind: objstore.ErrInvalid, Err: fmt.Errorf(format, args...)}
}

// begin checks the arguments of a call and starts an attempt's clock.
func (s *Store) begin(ctx context.Context, op objstore.Op, name string, size int64) (context.Context, context.CancelFunc, error) {
	if ctx.Err() != nil {
		return nil, nil, objstore.ContextError(ctx, op, name)
	}
	if op != objstore.OpList && op != objstore.OpBucketInfo {
		if err := objstore.CheckName(name); err != nil {
			return nil, nil, &objstore.Error{Op: op, Name: name, Kind: objstore.ErrInvalid, Err: err}
		}
	}
	attempt, cancel := context.WithTimeoutCause(ctx, s.cfg.attemptTimeout(size), errAttempt)
	return attempt, cancel, nil
}

// Create implements [objstore.Creator].
func (s *Store) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	attempt, cancel, err := s.begin(ctx, objstore.OpCreate, name, body.Size())
	if err != nil {
		return objstore.Attrs{}, err
	}
	defer cancel()
	r, err := body.Open()
	if err != nil {
		return objstore.Attrs{}, invalid(objstore.OpCreate, name, "open body: %w", err)
	}
	defer r.Close() //nolint:errcheck // a reader that was read to its checked end

	w := s.bucket.Object(name).If(storage.Conditions{DoesNotExist: true}).NewWriter(attempt)
	w.ChunkSize = 0 // one request, no chunk buffer
	w.ContentType = "application/octet-stream"
	w.CRC32C = body.CRC32C()
	w.SendCRC32C = true

	sum := &summingWriter{w: w}
	_, err = io.Copy(sum, r)
	switch {
	case sum.err != nil: // the upload failed, possibly before it took all
		err := createError(ctx, attempt, name, sum.err) // before cancel hides the cause
		cancel()
		_ = w.Close() // waits for the request's end; its error is sum.err's
		return objstore.Attrs{}, err
	case err == nil && sum.n != body.Size():
		err = fmt.Errorf("body has %d bytes, not the declared %d", sum.n, body.Size())
	case err == nil && sum.crc != body.CRC32C():
		err = fmt.Errorf("body has CRC32C %08x, not the declared %08x", sum.crc, body.CRC32C())
	}
	if err != nil {
		// Closing the writer now would store a truncated object: break the
		// request off instead.
		cancel()
		_ = w.Close()
		return objstore.Attrs{}, invalid(objstore.OpCreate, name, "read body: %w", err)
	}
	if err := w.Close(); err != nil {
		return objstore.Attrs{}, createError(ctx, attempt, name, err)
	}
	stored := fromAttrs(w.Attrs())
	if stored.Size != body.Size() || stored.CRC32C != body.CRC32C() {
		return stored, &objstore.Error{
			Op: objstore.OpCreate, Name: name, Kind: objstore.ErrCorrupt,
			Err: fmt.Errorf("stored %d bytes with CRC32C %08x, sent %d with %08x",
				stored.Size, stored.CRC32C, body.Size(), body.CRC32C()),
		}
	}
	return stored, nil
}

// createError names the two failures that mean something special on a create.
func createError(caller, attempt context.Context, name string, err error) error {
	e := fail(caller, attempt, objstore.OpCreate, name, err)
	switch {
	case errors.Is(e.Kind, objstore.ErrPrecondition):
		e.Kind = objstore.ErrExists
	case errors.Is(e.Kind, objstore.ErrNotFound):
		e.Kind = objstore.ErrBucketNotFound
	}
	return e
}

// summingWriter counts and sums what passes and keeps the writer's own error
// apart from that of the reader that feeds it.
type summingWriter struct {
	w   io.Writer
	n   int64
	crc uint32
	err error
}

func (s *summingWriter) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	s.n += int64(n)
	s.crc = objstore.UpdateCRC32C(s.crc, p[:n])
	if err != nil {
		s.err = err
	}
	return n, err
}

// Attrs implements [objstore.Reader].
func (s *Store) Attrs(ctx context.Context, name string) (objstore.Attrs, error) {
	attempt, cancel, err := s.begin(ctx, objstore.OpAttrs, name, 0)
	if err != nil {
		return objstore.Attrs{}, err
	}
	defer cancel()
	a, err := s.bucket.Object(name).Attrs(attempt)
	if err != nil {
		return objstore.Attrs{}, fail(ctx, attempt, objstore.OpAttrs, name, err)
	}
	return fromAttrs(a), nil
}

// ListPage implements [objstore.Lister].
func (s *Store) ListPage(ctx context.Context, prefix, startAfter string, limit int) ([]objstore.Attrs, bool, error) {
	if limit < 0 {
		return nil, false, invalid(objstore.OpList, "", "limit %d", limit)
	}
	attempt, cancel, err := s.begin(ctx, objstore.OpList, "", 0)
	if err != nil {
		return nil, false, err
	}
	defer cancel()
	if limit == 0 || limit > pageSize {
		limit = pageSize
	}
	query := &storage.Query{Prefix: prefix, StartOffset: startAfter, Projection: storage.ProjectionNoACL}
	if err := query.SetAttrSelection([]string{"Name", "Size", "CRC32C", "Generation", "Metageneration", "Created"}); err != nil {
		return nil, false, invalid(objstore.OpList, "", "attributes: %w", err)
	}
	// The service's start offset is inclusive: ask for one more and drop
	// startAfter itself, which comes first if it is there.
	ask := limit
	if startAfter != "" && ask < pageSize {
		ask++
	}
	pager := iterator.NewPager(s.bucket.Objects(attempt, query), ask, "")
	var items []*storage.ObjectAttrs
	next, err := pager.NextPage(&items)
	if err != nil {
		e := fail(ctx, attempt, objstore.OpList, "", err)
		if errors.Is(e.Kind, objstore.ErrNotFound) {
			e.Kind = objstore.ErrBucketNotFound
		}
		return nil, false, e
	}
	page := make([]objstore.Attrs, 0, len(items))
	more := next != ""
	for _, a := range items {
		if startAfter != "" && a.Name == startAfter {
			continue
		}
		if len(page) == limit {
			more = true
			break
		}
		page = append(page, fromAttrs(a))
	}
	return page, more, nil
}

// Delete implements [objstore.Deleter].
func (s *Store) Delete(ctx context.Context, name string, generation int64) error {
	if generation < 0 {
		return invalid(objstore.OpDelete, name, "generation %d", generation)
	}
	attempt, cancel, err := s.begin(ctx, objstore.OpDelete, name, 0)
	if err != nil {
		return err
	}
	defer cancel()
	object := s.bucket.Object(name)
	if generation != objstore.AnyGeneration {
		object = object.If(storage.Conditions{GenerationMatch: generation})
	}
	err = object.Delete(attempt)
	if err == nil {
		return nil
	}
	e := fail(ctx, attempt, objstore.OpDelete, name, err)
	switch {
	case errors.Is(e.Kind, objstore.ErrNotFound):
		return nil
	case errors.Is(e.Kind, objstore.ErrPrecondition):
		// No generation matches an absent object: the object may be gone, which
		// is success, or be another one.
		if _, err := s.bucket.Object(name).Attrs(attempt); err != nil && errors.Is(classify(err).kind, objstore.ErrNotFound) {
			return nil
		}
	}
	return e
}

// BucketSettings implements [objstore.Inspector].
func (s *Store) BucketSettings(ctx context.Context) (objstore.BucketSettings, error) {
	attempt, cancel, err := s.begin(ctx, objstore.OpBucketInfo, "", 0)
	if err != nil {
		return objstore.BucketSettings{}, err
	}
	defer cancel()
	a, err := s.bucket.Attrs(attempt)
	if err != nil {
		e := fail(ctx, attempt, objstore.OpBucketInfo, "", err)
		if errors.Is(e.Kind, objstore.ErrNotFound) {
			e.Kind = objstore.ErrBucketNotFound
		}
		return objstore.BucketSettings{}, e
	}
	return fromBucket(a), nil
}

func fromAttrs(a *storage.ObjectAttrs) objstore.Attrs {
	return objstore.Attrs{
		Name:           a.Name,
		Size:           a.Size,
		CRC32C:         a.CRC32C,
		Generation:     a.Generation,
		Metageneration: a.Metageneration,
		Created:        a.Created,
	}
}

func fromBucket(a *storage.BucketAttrs) objstore.BucketSettings {
	b := objstore.BucketSettings{
		Name:                  a.Name,
		Location:              a.Location,
		StorageClass:          a.StorageClass,
		Versioning:            a.VersioningEnabled,
		ObjectRetention:       a.ObjectRetentionMode == "Enabled",
		DefaultEventBasedHold: a.DefaultEventBasedHold,
		HierarchicalNamespace: a.HierarchicalNamespace != nil && a.HierarchicalNamespace.Enabled,
	}
	if a.SoftDeletePolicy != nil {
		b.SoftDelete = a.SoftDeletePolicy.RetentionDuration
	}
	if a.RetentionPolicy != nil {
		b.Retention = a.RetentionPolicy.RetentionPeriod
		b.RetentionLocked = a.RetentionPolicy.IsLocked
	}
	for _, r := range a.Lifecycle.Rules {
		b.Lifecycle = append(b.Lifecycle, objstore.LifecycleRule{
			Action:       r.Action.Type,
			StorageClass: r.Action.StorageClass,
			Prefixes:     r.Condition.MatchesPrefix,
			Suffixes:     r.Condition.MatchesSuffix,
			NoncurrentOnly: r.Condition.Liveness == storage.Archived ||
				r.Condition.NumNewerVersions > 0 ||
				r.Condition.DaysSinceNoncurrentTime > 0 ||
				!r.Condition.NoncurrentTimeBefore.IsZero(),
		})
	}
	return b
}
