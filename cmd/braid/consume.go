package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/braidlog/braid/pkg/client"
)

func consumeCommand() *command {
	return &command{
		name: "consume", args: "--topic T [flags]", summary: "read records to stdout, to the end or following it",
		help: `
Reads the records of all partitions, or of one, in order within each. Without --follow it ends where the partitions ended when
it got there; with it, when it is interrupted or has read --max-messages. It begins at the beginning, or, with --follow, at the
end, unless told otherwise. A change of leader is survived at the next offset.

Formats: lines, each value as it is with a newline; jsonl, one object a record with topic, partition, offset, timestamp_ms,
leader_epoch, key, value and headers. Keys and values that are not UTF-8 are in key_base64 and value_base64; absent ones are
left out. With --json the format is jsonl unless given, and the last line is a summary.
` + targetHelp,
		run: runConsume,
	}
}

// consumedRecord is a line of --format jsonl.
type consumedRecord struct {
	Topic       string           `json:"topic"`
	Partition   int32            `json:"partition"`
	Offset      int64            `json:"offset"`
	TimestampMS *int64           `json:"timestamp_ms,omitempty"`
	LeaderEpoch int32            `json:"leader_epoch"`
	Key         *string          `json:"key,omitempty"`
	KeyBase64   string           `json:"key_base64,omitempty"`
	Value       *string          `json:"value,omitempty"`
	ValueBase64 string           `json:"value_base64,omitempty"`
	Headers     []consumedHeader `json:"headers,omitempty"`
}

type consumedHeader struct {
	Key         string  `json:"key"`
	Value       *string `json:"value,omitempty"`
	ValueBase64 string  `json:"value_base64,omitempty"`
}

// consumeSummary is the last line of `braid consume --json`.
type consumeSummary struct {
	Topic      string              `json:"topic"`
	Records    int64               `json:"records"`
	Bytes      int64               `json:"bytes"` // of keys and values
	Partitions []partitionConsumed `json:"partitions"`
	ElapsedMS  float64             `json:"elapsed_ms"`
	Error      string              `json:"error,omitempty"`
}

// partitionConsumed is what was read of one partition.
type partitionConsumed struct {
	Partition int32 `json:"partition"`
	Records   int64 `json:"records"`
	// FirstOffset and LastOffset (inclusive) are of records read, -1 for none.
	FirstOffset   int64 `json:"first_offset"`
	LastOffset    int64 `json:"last_offset"`
	HighWatermark int64 `json:"high_watermark"` // as last told
}

type consumeFlags struct {
	target
	topic, format, fromTime string
	beginning, follow, json bool
	partition               int
	offset, max             int64
}

func runConsume(ctx context.Context, c *console, cmd *command, args []string) error {
	fs := flag.NewFlagSet("consume", flag.ContinueOnError)
	var f consumeFlags
	f.register(fs)
	fs.StringVar(&f.topic, "topic", "", "`name` of the topic")
	fs.BoolVar(&f.beginning, "from-beginning", false, "begin at the first offset of the log")
	fs.StringVar(&f.fromTime, "from-time", "", "begin at the first record at or after a `time`: RFC 3339, milliseconds since 1970, or how long ago, such as 10m")
	fs.IntVar(&f.partition, "partition", -1, "read only this `partition`")
	fs.Int64Var(&f.offset, "offset", -1, "begin at this `offset`, with --partition")
	fs.BoolVar(&f.follow, "follow", false, "wait at the end for more")
	fs.Int64Var(&f.max, "max-messages", 0, "end after this many records; 0 is no limit")
	fs.StringVar(&f.format, "format", "", "`format` of the output: lines or jsonl (default lines, with --json jsonl)")
	fs.BoolVar(&f.json, "json", false, "write a summary as JSON, as the last line")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if f.topic, err = topicArg(f.topic, rest); err != nil {
		return err
	}
	start, err := f.start(time.Now())
	if err != nil {
		return err
	}
	if f.format == "" {
		f.format = map[bool]string{true: "jsonl", false: "lines"}[f.json]
	}
	if f.format != "lines" && f.format != "jsonl" {
		return usagef("--format %q: must be lines or jsonl", f.format)
	}
	cl, err := f.client()
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }() // nothing was changed
	s, err := consume(ctx, c, cl, &f, start)
	if f.json {
		if err != nil {
			s.Error = err.Error()
		}
		if perr := c.printJSON(s); perr != nil {
			return perr
		}
	}
	return err
}

// start is where the flags say to begin.
func (f *consumeFlags) start(now time.Time) (client.Start, error) {
	given := 0
	for _, set := range []bool{f.beginning, f.fromTime != "", f.offset >= 0} {
		if set {
			given++
		}
	}
	switch {
	case given > 1:
		return client.Start{}, usagef("only one of --from-beginning, --from-time and --offset can be given")
	case f.max < 0:
		return client.Start{}, usagef("--max-messages %d: must be 0 or more", f.max)
	case f.offset >= 0 && f.partition < 0:
		return client.Start{}, usagef("--offset needs --partition")
	case f.offset >= 0:
		return client.FromOffset(f.offset), nil
	case f.fromTime != "":
		t, err := parseTime(f.fromTime, now)
		return client.FromTime(t), err
	case f.follow && !f.beginning:
		return client.FromEnd(), nil
	}
	return client.Start{}, nil
}

// parseTime reads a point in time: RFC 3339, milliseconds since 1970, or an age.
func parseTime(s string, now time.Time) (time.Time, error) {
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t, nil
	}
	if ms, err := strconv.ParseInt(s, 10, 64); err == nil && ms >= 0 {
		return time.UnixMilli(ms), nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, usagef("--from-time %q: must be like 2018-01-31T10:00:00Z, 1517392800000 or 10m", s)
}

// errEnough ends the readers when the records asked for are there.
var errEnough = errors.New("enough records")

// sink writes records, one at a time.
type sink struct {
	mu    sync.Mutex // guards all below
	w     *bufio.Writer
	f     *consumeFlags
	n     int64
	bytes int64
}

// put writes a record, unless there are enough already. enough says that no more
// are wanted.
func (s *sink) put(m *client.Message) (written, enough bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.f.max > 0 && s.n >= s.f.max {
		return false, true, nil
	}
	if s.f.format == "lines" {
		if _, err = s.w.Write(m.Value); err == nil {
			err = s.w.WriteByte('\n')
		}
	} else {
		var line []byte
		if line, err = json.Marshal(recordLine(s.f.topic, m)); err == nil {
			_, err = s.w.Write(append(line, '\n'))
		}
	}
	if err == nil && s.f.follow {
		err = s.w.Flush() // whoever watches shall see it now
	}
	if err != nil {
		return false, false, fmt.Errorf("write the output: %w", err)
	}
	s.n++
	s.bytes += int64(len(m.Key) + len(m.Value))
	return true, s.f.max > 0 && s.n == s.f.max, nil
}

func (s *sink) count() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n
}

func recordLine(topic string, m *client.Message) consumedRecord {
	out := consumedRecord{Topic: topic, Partition: m.Partition, Offset: m.Offset, LeaderEpoch: m.Leadership.LeaderEpoch}
	if !m.Timestamp.IsZero() {
		ms := m.Timestamp.UnixMilli()
		out.TimestampMS = &ms
	}
	out.Key, out.KeyBase64 = textOrBase64(m.Key)
	out.Value, out.ValueBase64 = textOrBase64(m.Value)
	for _, h := range m.Headers {
		x := consumedHeader{Key: string(h.Key)}
		x.Value, x.ValueBase64 = textOrBase64(h.Value)
		out.Headers = append(out.Headers, x)
	}
	return out
}

func textOrBase64(b []byte) (text *string, coded string) {
	if b == nil {
		return nil, ""
	}
	if !utf8.Valid(b) {
		return nil, base64.StdEncoding.EncodeToString(b)
	}
	s := string(b)
	return &s, ""
}

// consume reads the partitions side by side. The summary is right also with an
// error.
func consume(ctx context.Context, c *console, cl *client.Client, f *consumeFlags, start client.Start) (s consumeSummary, err error) {
	begin := time.Now()
	s.Topic, s.Partitions = f.topic, []partitionConsumed{}
	topic, err := cl.DescribeTopic(ctx, f.topic)
	if err != nil {
		return s, err
	}
	if f.partition >= len(topic.Partitions) {
		return s, fmt.Errorf("topic %s has no partition %d, only 0 to %d", f.topic, f.partition, len(topic.Partitions)-1)
	}
	if _, err := cl.DescribeCluster(ctx); err != nil { // so that any broker may die
		return s, err
	}
	out := &sink{w: bufio.NewWriterSize(c.stdout, 1<<16), f: f}
	show := showProgress(c, func() string {
		return fmt.Sprintf("read %d, %.1fs", out.count(), time.Since(begin).Seconds())
	})
	if f, ok := c.stdout.(*os.File); ok && isTerminal(f) {
		show.close() // the records show enough
	}
	defer show.close()

	for i := range topic.Partitions {
		if f.partition < 0 || f.partition == i {
			s.Partitions = append(s.Partitions, partitionConsumed{Partition: int32(i), FirstOffset: -1, LastOffset: -1})
		}
	}
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for i := range s.Partitions {
		p := &s.Partitions[i]
		wg.Go(func() {
			if err := consumePartition(ctx, cl, f, start, p, out); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if ferr := out.w.Flush(); ferr != nil {
		err = fmt.Errorf("write the output: %w", ferr)
	}
	s.Records, s.Bytes = out.n, out.bytes
	s.ElapsedMS = millis(time.Since(begin))
	cause := context.Cause(ctx)
	switch {
	case cause == nil, errors.Is(cause, errEnough):
	case outer.Err() != nil:
		if !f.follow { // following ends like this, the rest is incomplete
			err = errors.Join(errors.New("interrupted before the end"), err)
		}
	default:
		err = errors.Join(cause, err)
	}
	return s, err
}

func consumePartition(ctx context.Context, cl *client.Client, f *consumeFlags, start client.Start, p *partitionConsumed, out *sink) error {
	r, err := cl.NewReader(client.ReaderOptions{Topic: f.topic, Partition: p.Partition, Start: start, Follow: f.follow})
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // it was only read
	defer func() { p.HighWatermark = r.HighWatermark() }()
	for {
		m, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil // whoever ended it has the reason
			}
			return err
		}
		written, enough, err := out.put(&m)
		if err != nil {
			return err
		}
		if written {
			if p.FirstOffset < 0 {
				p.FirstOffset = m.Offset
			}
			p.LastOffset = m.Offset
			p.Records++
		}
		if enough {
			return errEnough
		}
	}
}
