package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/record"
)

func produceCommand() *command {
	return &command{
		name: "produce", args: "--topic T [--file F] [flags]", summary: "append records from a file or stdin",
		help: `
Appends the records of a file, or of stdin, and waits until each is acked at the level asked for.

Formats: lines, each line is a value, every byte up to its newline; jsonl, each line is a JSON object, stored as it is; csv, the first line names the columns
and each row is stored as a JSON object of strings. --key FIELD takes a field or column as the record's key: records of one
key keep their order and share a partition. Records without a key are spread.

A line that is malformed, or larger than the topic takes, is named by its number. A regular file is checked as a whole first, so
then nothing is produced; a partition or level that the topic does not have is refused before anything is read. A stream
(--file - or a pipe) ends at the bad line: everything before it is sent, and the summary says exactly what was acked.
A change of leader is survived by repeating what is safe to repeat; nothing is stored twice.
` + targetHelp,
		run: runProduce,
	}
}

// produceSummary is the last line of `braid produce --json`.
type produceSummary struct {
	Topic   string `json:"topic"`
	Records int64  `json:"records"` // read from the input and sent
	Acked   int64  `json:"acked"`   // at the level asked for
	// Failed were not acked; Unknown of them may be stored all the same.
	Failed  int64 `json:"failed"`
	Unknown int64 `json:"unknown"`
	Bytes   int64 `json:"bytes"` // of keys and values acked
	// Levels counts acks by the levels they carried.
	Levels     map[string]int64    `json:"levels"`
	Partitions []partitionProduced `json:"partitions"`
	ElapsedMS  float64             `json:"elapsed_ms"`
	AckP50MS   float64             `json:"ack_p50_ms"`
	AckP99MS   float64             `json:"ack_p99_ms"`
	// Line is the malformed line that the input ended at, 0 for none.
	Line  int    `json:"line,omitempty"`
	Error string `json:"error,omitempty"`
}

// partitionProduced is what was acked in one partition.
type partitionProduced struct {
	Partition   int32 `json:"partition"`
	Records     int64 `json:"records"`
	FirstOffset int64 `json:"first_offset"`
	LastOffset  int64 `json:"last_offset"` // inclusive
}

type produceFlags struct {
	target
	topic, file, format, key, level, codec string
	partition                              int
	json                                   bool
}

func runProduce(ctx context.Context, c *console, cmd *command, args []string) error {
	fs := flag.NewFlagSet("produce", flag.ContinueOnError)
	var f produceFlags
	f.register(fs)
	fs.StringVar(&f.topic, "topic", "", "`name` of the topic")
	fs.StringVar(&f.file, "file", "-", "`file` to read, - for stdin")
	fs.StringVar(&f.format, "format", "lines", "`format` of the input: lines, jsonl or csv")
	fs.StringVar(&f.key, "key", "", "`field` or column that is the record's key")
	fs.StringVar(&f.level, "level", "", "`level` to wait for: LEADER or OBJECT; without it the topic's min.ack.level")
	fs.StringVar(&f.codec, "codec", "none", "`compression` of batches: none, gzip, snappy, lz4 or zstd")
	fs.IntVar(&f.partition, "partition", anyPartition, "`partition` to append to, whatever the key")
	fs.BoolVar(&f.json, "json", false, "write the summary as JSON, as the last line")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if f.topic, err = topicArg(f.topic, rest); err != nil {
		return err
	}
	level, err := client.ParseLevel(f.level)
	if err != nil {
		return &usageError{fmt.Errorf("--%w", err)}
	}
	codec, err := record.ParseCodec(f.codec)
	if err != nil {
		return &usageError{fmt.Errorf("--codec: %w", err)}
	}
	if _, err := newInput(strings.NewReader("x\n"), f.format, ""); err != nil {
		return err
	}
	src, err := openSource(ctx, c, f.file)
	if err != nil {
		return err
	}
	defer src.close()
	cl, err := f.client()
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }() // everything is acked or told by then
	topic, err := cl.DescribeTopic(ctx, f.topic)
	if err != nil {
		return err
	}
	if err := topic.CheckLevel(level); err != nil {
		return err
	}
	if f.partition != anyPartition {
		if err := topic.CheckPartition(f.partition); err != nil {
			return err
		}
	}
	in, total, err := src.input(&f, topic)
	if err != nil {
		return err
	}
	p, err := cl.NewProducer(ctx, client.ProducerOptions{Topic: f.topic, Level: level, Codec: codec})
	if err != nil {
		return err
	}
	s, err := produce(ctx, c, p, in, total, int32(f.partition))
	s.Topic = f.topic
	if err != nil {
		s.Error = err.Error()
	}
	var bad *lineError
	if errors.As(err, &bad) {
		s.Line = bad.line
	}
	if f.json {
		if perr := c.printJSON(s); perr != nil {
			return perr
		}
	} else {
		tellProduced(c, s)
	}
	return err
}

// anyPartition leaves the choice of the partition to the producer.
const anyPartition = -1

// source is where the input comes from.
type source struct {
	r io.Reader
	// file is r where that is a regular file, which can be read twice.
	file  *os.File
	close func()
}

func openSource(ctx context.Context, c *console, name string) (*source, error) {
	if name == "-" {
		return &source{r: interruptible(ctx, c.stdin), close: func() {}}, nil
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	s := &source{r: file, close: func() { _ = file.Close() }} // it is only read
	info, err := file.Stat()
	if err == nil && info.IsDir() {
		err = fmt.Errorf("%s is a directory", name)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	if info.Mode().IsRegular() {
		s.file = file
	}
	return s, nil
}

// input is what to read records from, all of them checked where that is possible:
// total is their number then, else -1.
func (s *source) input(f *produceFlags, topic *client.Topic) (in input, total int64, err error) {
	total = -1
	if s.file != nil {
		total, err = checkInput(s.file, f.format, f.key, topic)
		if err == nil {
			_, err = s.file.Seek(0, io.SeekStart)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("%s: %w; nothing was produced", f.file, err)
		}
	}
	in, err = newInput(s.r, f.format, f.key)
	return in, total, err
}

// interruptible is r until ctx ends. A read of r that never returns is left to
// the end of the process.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	pr, pw := io.Pipe()
	context.AfterFunc(ctx, func() { _ = pw.CloseWithError(context.Cause(ctx)) })
	go func() {
		_, err := io.Copy(pw, r)
		_ = pw.CloseWithError(err) // nil is io.EOF for the reader
	}()
	return pr
}

// checkInput reads all of an input and counts its records, none of which is
// malformed or larger than the topic takes.
func checkInput(r io.Reader, format, key string, topic *client.Topic) (n int64, err error) {
	in, err := newInput(r, format, key)
	if err != nil {
		return 0, err
	}
	for {
		rec, err := in.next()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return 0, err
		}
		if err := topic.CheckRecord(&client.Record{Key: rec.key, Value: rec.value}); err != nil {
			return 0, &lineError{rec.line, err}
		}
		n++
	}
}

// sent is a record on its way.
type sent struct {
	pending client.Pending
	bytes   int64
	line    int
}

// maxSent bounds the records between sending and the count of their acks.
const maxSent = 1 << 16

// produce sends the whole input and collects the acks. The summary is right also
// with an error.
func produce(ctx context.Context, c *console, p *client.Producer, in input, total int64, partition int32) (s produceSummary, err error) {
	start := time.Now()
	var read, acked atomic.Int64
	show := showProgress(c, func() string {
		of := ""
		if total >= 0 {
			of = fmt.Sprintf(" of %d", total)
		}
		return fmt.Sprintf("sent %d%s, acked %d, %.1fs", read.Load(), of, acked.Load(), time.Since(start).Seconds())
	})
	defer show.close()

	queue := make(chan sent, maxSent)
	failed := make(chan struct{})
	col := &collector{acked: &acked, failed: failed, partitions: map[int32]*partitionProduced{}, levels: map[string]int64{}}
	var collecting sync.WaitGroup
	collecting.Go(func() { col.run(queue) })

	err = sendAll(ctx, p, in, partition, queue, failed, &read)
	close(queue)
	// What was sent gets its time to be acked, also after a signal.
	flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout(ctx))
	defer cancel()
	if cerr := p.Close(flush); cerr != nil && err == nil {
		err = fmt.Errorf("some records have no answer: %w", cerr)
	}
	collecting.Wait()
	s = col.summary()
	s.Records = read.Load()
	s.ElapsedMS = millis(time.Since(start))
	if col.first != nil {
		err = errors.Join(col.first, err)
	}
	return s, err
}

// flushTimeout is how long acks are waited for at the end: the producer's own
// timeout, or a little after a signal.
func flushTimeout(ctx context.Context) time.Duration {
	if ctx.Err() != nil {
		return 10 * time.Second
	}
	return 3 * time.Minute
}

func sendAll(ctx context.Context, p *client.Producer, in input, partition int32, queue chan<- sent, failed <-chan struct{}, read *atomic.Int64) error {
	for {
		select {
		case <-failed:
			return nil // the collector tells why
		default:
		}
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted after %d records", read.Load())
		}
		rec, err := in.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			if interrupted(ctx) {
				return fmt.Errorf("interrupted after %d records", read.Load())
			}
			return err
		}
		r := client.Record{Key: rec.key, Value: rec.value}
		var pending client.Pending
		if partition != anyPartition {
			pending, err = p.SendTo(ctx, partition, r)
		} else {
			pending, err = p.Send(ctx, r)
		}
		if err != nil {
			if interrupted(ctx) {
				return fmt.Errorf("interrupted after %d records", read.Load())
			}
			var stopped *client.DeliveryError
			if errors.As(err, &stopped) {
				return nil // the collector tells why
			}
			return &lineError{rec.line, err}
		}
		read.Add(1)
		queue <- sent{pending: pending, bytes: int64(len(rec.key) + len(rec.value)), line: rec.line}
	}
}

// collector counts answers.
type collector struct {
	acked      *atomic.Int64
	failed     chan struct{} // closed with the first failure
	first      error
	nFailed    int64
	unknown    int64
	bytes      int64
	latency    latencies
	levels     map[string]int64
	partitions map[int32]*partitionProduced
}

func (col *collector) run(queue <-chan sent) {
	for x := range queue {
		ack, err := x.pending.Wait(context.Background()) // the producer bounds it
		if err != nil {
			col.nFailed++
			var d *client.DeliveryError
			if errors.As(err, &d) && d.MaybeStored {
				col.unknown++
			}
			if col.first == nil {
				col.first = fmt.Errorf("line %d was not acked: %w", x.line, err)
				close(col.failed)
			}
			continue
		}
		col.acked.Add(1)
		col.bytes += x.bytes
		col.latency.add(ack.Latency)
		for _, l := range ack.Levels.List() {
			col.levels[l.String()]++
		}
		p, ok := col.partitions[ack.Partition]
		if !ok {
			p = &partitionProduced{Partition: ack.Partition, FirstOffset: ack.Offset}
			col.partitions[ack.Partition] = p
		}
		p.Records++
		p.LastOffset = ack.Offset
	}
}

func (col *collector) summary() produceSummary {
	s := produceSummary{
		Acked: col.acked.Load(), Failed: col.nFailed, Unknown: col.unknown, Bytes: col.bytes, Levels: col.levels,
		AckP50MS: col.latency.ms(0.5), AckP99MS: col.latency.ms(0.99), Partitions: []partitionProduced{},
	}
	for _, p := range col.partitions {
		s.Partitions = append(s.Partitions, *p)
	}
	slices.SortFunc(s.Partitions, func(a, b partitionProduced) int { return int(a.Partition - b.Partition) })
	return s
}

func tellProduced(c *console, s produceSummary) {
	var levels []string
	for name, n := range s.Levels {
		levels = append(levels, fmt.Sprintf("%s %d", name, n))
	}
	slices.Sort(levels)
	fmt.Fprintf(c.stdout, "%d of %d records acked in %s (%s), %d bytes, %.1f s, ack p50 %.1f ms, p99 %.1f ms\n",
		s.Acked, s.Records, count(len(s.Partitions), "partition"), strings.Join(levels, ", "), s.Bytes, s.ElapsedMS/1000, s.AckP50MS, s.AckP99MS)
	if s.Failed > 0 {
		fmt.Fprintf(c.stdout, "%d not acked, %d of them may be stored all the same\n", s.Failed, s.Unknown)
	}
}
