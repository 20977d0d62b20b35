package main

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/client"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// earthquakes are a day and more of the public earthquake feed, one JSON object a
// line: the same file as testdata/earthquakes.jsonl, so that the demo runs from
// any directory.
//
//go:embed earthquakes.jsonl
var earthquakes []byte

// The demo's cluster and topic.
const (
	demoTopic      = "earthquakes"
	demoPartitions = 12
)

// demoReplaceAfter is short, since the demo is about what follows.
const demoReplaceAfter = 200 * time.Millisecond

var demoShape = devShape{Brokers: 3, RLMs: 2, Metadata: 1, Zones: 3}

// demoResult is the last line of `braid demo --json`. Every figure is measured.
type demoResult struct {
	Records    int   `json:"records"`    // of the input
	Acked      int   `json:"acked"`      // at OBJECT
	Read       int   `json:"read"`       // from the beginning to the end, all partitions
	Lost       int   `json:"lost"`       // acked and not read
	Duplicated int   `json:"duplicated"` // read more often than sent
	Reordered  int   `json:"reordered"`  // read behind a record of the same key that was sent later
	FailoverMS int64 `json:"failover_ms"`
	// Objects, their mean size and in how many partitions' ranges one has a part.
	Objects             int     `json:"objects"`
	BytesPerObject      float64 `json:"bytes_per_object"`
	PartitionsPerObject float64 `json:"partitions_per_object"`
	AckP50MS            float64 `json:"ack_p50_ms"`
	AckP99MS            float64 `json:"ack_p99_ms"`
	// Levels counts acks by the levels they carried.
	Levels map[string]int `json:"levels"`
}

// problems lists what the demo promises and did not show.
func (r *demoResult) problems() []string {
	var out []string
	check := func(ok bool, format string, args ...any) {
		if !ok {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	check(r.Records > 0, "there were no records")
	check(r.Acked == r.Records, "%d of %d records were acked", r.Acked, r.Records)
	check(r.Levels["OBJECT"] == r.Records, "%d of %d acks carried OBJECT", r.Levels["OBJECT"], r.Records)
	check(r.Read == r.Records, "%d of %d records were read", r.Read, r.Records)
	check(r.Lost == 0, "%d records were lost", r.Lost)
	check(r.Duplicated == 0, "%d records were duplicated", r.Duplicated)
	check(r.Reordered == 0, "%d records were reordered", r.Reordered)
	check(r.FailoverMS > 0, "no ack came from a broker that took over")
	check(r.PartitionsPerObject > 1, "an object holds %.2f partitions on average, not more than one", r.PartitionsPerObject)
	return out
}

func demoCommand() *command {
	return &command{
		name: "demo", args: "[flags]", summary: "run the main job on real input: kill a leader under load, lose nothing",
		help: `
Starts three brokers in three zones, two remote-log managers and one metadata replica, each a process of its own, on an embedded
etcd and an embedded object store with the latency of a bucket. Appends 1,707 earthquakes, keyed by the network that reported
them, to a topic of 12 partitions and waits for OBJECT acks. In the middle of the load it kills, with SIGKILL, the broker that
leads the busiest partition, and leaves it dead: brokers with empty logs take over. Then it reads everything back and compares
content, and order per key. The topic has one replica a partition, so that the bucket holds the only living copy of what the
killed broker led, and the controller gives its partitions to brokers that never saw them. Exit code 0 only when nothing was lost, duplicated or reordered, every ack carried OBJECT, and
objects hold more than one partition each.

With --json the last line is {records, acked, read, lost, duplicated, reordered, failover_ms, objects, bytes_per_object,
partitions_per_object, ack_p50_ms, ack_p99_ms, levels}. failover_ms is the time from the SIGKILL to the first OBJECT ack that
another broker gave for a partition of the killed one.`,
		run: runDemo,
	}
}

// demo is one run.
type demo struct {
	c       *console
	json    bool
	pace    time.Duration // of the whole load
	key     string
	cluster *devCluster
	client  *client.Client
	admin   *client.Admin
	result  demoResult

	// The killed broker: its address, the partitions it led, when it died.
	victim    string
	victimID  int32
	orphans   map[int32]bool
	killed    time.Time
	killedAt  int // records sent before
	firstBack time.Time
}

func runDemo(ctx context.Context, c *console, cmd *command, args []string) (err error) {
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	file := fs.String("file", "", "JSON lines `file` to use instead of the earthquakes")
	key := fs.String("key", "net", "`field` that is the record's key")
	pace := fs.Duration("load", 6*time.Second, "`duration` over which the records are sent")
	dir := fs.String("data-dir", "", "new `directory` to keep the cluster's data in; without it a temporary one")
	fast := fs.Bool("no-cloud-latency", false, "let the object store answer as fast as it can")
	asJSON := fs.Bool("json", false, "write the result as JSON, as the last line")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if err := noArgs(rest); err != nil {
		return err
	}
	data := earthquakes
	if *file != "" {
		if data, err = os.ReadFile(*file); err != nil {
			return err
		}
	}
	records, err := demoRecords(data, *key)
	if err != nil {
		return err
	}
	if *dir != "" {
		if _, ok, err := readShape(*dir); err != nil || ok {
			return errors.Join(usagef("--data-dir %s holds a cluster already", *dir), err)
		}
	}
	d := &demo{c: c, json: *asJSON, pace: *pace, key: *key, orphans: map[int32]bool{}}
	d.result.Records = len(records)
	d.result.Levels = map[string]int{}
	err = d.run(ctx, records, devOptions{shape: demoShape, dir: *dir, processes: true, cloudLatency: !*fast, replaceAfter: demoReplaceAfter})
	if interrupted(ctx) {
		return errors.New("interrupted")
	}
	if err != nil {
		return err
	}
	problems := d.result.problems()
	if *asJSON {
		if err := c.printJSON(d.result); err != nil {
			return err
		}
	}
	if len(problems) > 0 {
		return fmt.Errorf("the demo did not show what it promises: %s", strings.Join(problems, "; "))
	}
	return nil
}

// demoRecord is a record of the input.
type demoRecord struct{ key, value []byte }

func demoRecords(data []byte, key string) ([]demoRecord, error) {
	in, err := newInput(bytes.NewReader(data), "jsonl", key)
	if err != nil {
		return nil, err
	}
	var out []demoRecord
	for {
		rec, err := in.next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		out = append(out, demoRecord{key: slices.Clone(rec.key), value: slices.Clone(rec.value)})
	}
}

// say tells the story, beside the JSON on stderr.
func (d *demo) say(format string, args ...any) {
	w := d.c.stdout
	if d.json {
		w = d.c.stderr
	}
	fmt.Fprintf(w, format+"\n", args...)
}

func (d *demo) run(ctx context.Context, records []demoRecord, opts devOptions) (err error) {
	begin := time.Now()
	d.say("Starting %s in %s, %s and %s, each a process of its own…",
		count(opts.shape.Brokers, "broker"), count(opts.shape.Zones, "zone"), count(opts.shape.RLMs, "remote-log manager"), count(opts.shape.Metadata, "metadata replica"))
	if d.cluster, err = startDev(ctx, opts); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.cluster.stop(context.WithoutCancel(ctx))) }()
	d.say("  ready after %.1f s; the object store is an emulator%s", time.Since(begin).Seconds(),
		map[bool]string{true: " that answers as slowly as a bucket in the cloud"}[opts.cloudLatency])
	if err := d.connect(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.client.Close(), d.admin.Close()) }()

	keys := map[string]bool{}
	for _, r := range records {
		keys[string(r.key)] = true
	}
	d.say("Topic %s: %d partitions, %d records of %d keys (%s), acked when they are in the bucket and committed.",
		demoTopic, demoPartitions, len(records), len(keys), d.key)
	if err := d.load(ctx, records); err != nil {
		return err
	}
	if err := d.tellTakeOver(ctx); err != nil {
		return err
	}
	if err := d.verify(ctx, records); err != nil {
		return err
	}
	return d.measure(ctx)
}

func (d *demo) connect(ctx context.Context) (err error) {
	e := d.cluster.snapshot()
	if d.client, err = client.Dial(client.Options{Brokers: e.addresses("broker")}); err != nil {
		return err
	}
	if d.admin, err = d.cluster.admin(); err != nil {
		return errors.Join(err, d.client.Close())
	}
	resp, err := d.admin.Topics().CreateTopic(ctx, &metadatav1.CreateTopicRequest{
		Name: demoTopic, PartitionCount: demoPartitions, ReplicationFactor: 1, Configs: map[string]string{"min.ack.level": "OBJECT"},
	})
	if err == nil {
		_, err = awaitLeaders(ctx, d.admin, resp.GetTopic(), 30*time.Second)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("create the topic: %w", err), d.client.Close(), d.admin.Close())
	}
	return err
}

// load sends all records at an even pace and kills a leader in the middle.
func (d *demo) load(ctx context.Context, records []demoRecord) error {
	p, err := d.client.NewProducer(ctx, client.ProducerOptions{Topic: demoTopic, Level: client.LevelObject})
	if err != nil {
		return err
	}
	if err := d.chooseVictim(ctx, p, records); err != nil {
		return errors.Join(err, p.Close(ctx))
	}
	acks := make(chan client.Pending, len(records))
	var collector sync.WaitGroup
	var lat latencies
	var failure error
	collector.Go(func() { failure = d.collect(acks, &lat) })

	begin := time.Now()
	err = d.sendPaced(ctx, p, records, acks)
	close(acks)
	flush, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = errors.Join(err, p.Close(flush))
	collector.Wait()
	if err = errors.Join(err, failure); err != nil {
		return err
	}
	d.result.AckP50MS, d.result.AckP99MS = lat.ms(0.5), lat.ms(0.99)
	d.say("  %d records acked at OBJECT in %.1f s, half of them within %.0f ms, 99 %% within %.0f ms (the take-over included)",
		d.result.Acked, time.Since(begin).Seconds(), d.result.AckP50MS, d.result.AckP99MS)
	if !d.firstBack.IsZero() {
		d.result.FailoverMS = d.firstBack.Sub(d.killed).Milliseconds()
		d.say("  first OBJECT ack of another broker for one of its partitions %d ms after the kill", d.result.FailoverMS)
	}
	return nil
}

// chooseVictim finds the leader of the partition that gets most records.
func (d *demo) chooseVictim(ctx context.Context, p *client.Producer, records []demoRecord) error {
	perPartition := map[int32]int{}
	for _, r := range records {
		perPartition[p.PartitionFor(r.key)]++
	}
	busiest := int32(0)
	for partition, n := range perPartition {
		if n > perPartition[busiest] || n == perPartition[busiest] && partition < busiest {
			busiest = partition
		}
	}
	topic, err := d.client.DescribeTopic(ctx, demoTopic)
	if err != nil {
		return err
	}
	leader := topic.Partitions[busiest]
	d.victim, d.victimID = leader.LeaderAddress, leader.LeaderID
	for _, x := range topic.Partitions {
		if x.LeaderID == d.victimID {
			d.orphans[x.Index] = true
		}
	}
	d.say("Partition %d is the busiest with %d records; broker %d leads it and %d others.", busiest, perPartition[busiest], d.victimID, len(d.orphans)-1)
	return nil
}

func (d *demo) sendPaced(ctx context.Context, p *client.Producer, records []demoRecord, acks chan<- client.Pending) error {
	begin := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i, r := range records {
		if due := d.pace * time.Duration(i) / time.Duration(len(records)); due > time.Since(begin) {
			timer.Reset(due - time.Since(begin))
			select {
			case <-timer.C:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if i == len(records)/2 {
			d.killedAt = i
			d.killed = time.Now() // the collector reads it behind the channel
			pid, err := d.cluster.kill("broker", int(d.victimID))
			if err != nil {
				return err
			}
			d.say("  after %d records: SIGKILL for broker %d (pid %d); it stays dead", i, d.victimID, pid)
		}
		pending, err := p.Send(ctx, client.Record{Key: r.key, Value: r.value})
		if err != nil {
			return fmt.Errorf("record %d: %w", i+1, err)
		}
		acks <- pending
	}
	return nil
}

// collect takes the answers in the order of sending.
func (d *demo) collect(acks <-chan client.Pending, lat *latencies) error {
	var first error
	for pending := range acks {
		ack, err := pending.Wait(context.Background()) // the producer bounds it
		if err != nil {
			if first == nil {
				first = err
			}
			continue
		}
		d.result.Acked++
		lat.add(ack.Latency)
		for _, l := range ack.Levels.List() {
			d.result.Levels[l.String()]++
		}
		if d.orphans[ack.Partition] && ack.Broker != d.victim && ack.Levels.Has(client.LevelObject) {
			if d.firstBack.IsZero() || pending.AnsweredAt().Before(d.firstBack) {
				d.firstBack = pending.AnsweredAt()
			}
		}
	}
	return first
}

// tellTakeOver shows who leads now, and that the logs there began with the
// take-over.
func (d *demo) tellTakeOver(ctx context.Context) error {
	perBroker := map[int32]int{}
	var remote int64
	for partition := range d.orphans {
		resp, err := d.client.Explain(ctx, demoTopic, partition)
		if err != nil {
			return err
		}
		perBroker[resp.GetLeaderId()]++
		remote += resp.GetLocalLogStartOffset() - resp.GetLogStartOffset()
	}
	var who []string
	for id, n := range perBroker {
		who = append(who, fmt.Sprintf("broker %d leads %d of its partitions", id, n))
	}
	slices.Sort(who)
	d.say("Taken over: %s; %d of their records are on no living broker's disk and come from the bucket.", strings.Join(who, ", "), remote)
	return nil
}

// verify reads everything back and compares it with what was sent.
func (d *demo) verify(ctx context.Context, records []demoRecord) error {
	begin := time.Now()
	read := make([][]demoRecord, demoPartitions)
	errs := make([]error, demoPartitions)
	var wg sync.WaitGroup
	for p := range int32(demoPartitions) {
		wg.Go(func() { read[p], errs[p] = readAll(ctx, d.client, demoTopic, p) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	cmp := compare(records, slices.Concat(read...))
	d.result.Read, d.result.Lost, d.result.Duplicated, d.result.Reordered = cmp.read, cmp.lost, cmp.duplicated, cmp.reordered
	d.say("Read back %d records in %.1f s: %d lost, %d duplicated, %d reordered within a key.",
		cmp.read, time.Since(begin).Seconds(), cmp.lost, cmp.duplicated, cmp.reordered)
	return nil
}

func readAll(ctx context.Context, c *client.Client, topic string, partition int32) ([]demoRecord, error) {
	r, err := c.NewReader(client.ReaderOptions{Topic: topic, Partition: partition})
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // it was only read
	var out []demoRecord
	for {
		m, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		out = append(out, demoRecord{key: slices.Clone(m.Key), value: slices.Clone(m.Value)})
	}
}

// comparison is what was read against what was sent.
type comparison struct{ read, lost, duplicated, reordered int }

// compare goes by content: a record is its key and value. Records of one key are
// read in one partition, so their order in read is that of the log.
func compare(sent, read []demoRecord) comparison {
	c := comparison{read: len(read)}
	id := func(r demoRecord) string { return fmt.Sprintf("%d:%s%s", len(r.key), r.key, r.value) }
	places := map[string][]int{} // of a content in sent, those not read yet
	for i, r := range sent {
		places[id(r)] = append(places[id(r)], i)
	}
	last := map[string]int{} // per key, the furthest place read
	for _, r := range read {
		left := places[id(r)]
		if len(left) == 0 {
			c.duplicated++ // or never sent, which is no better
			continue
		}
		places[id(r)] = left[1:]
		if furthest, ok := last[string(r.key)]; ok && left[0] < furthest {
			c.reordered++
		} else {
			last[string(r.key)] = left[0]
		}
	}
	for _, left := range places {
		c.lost += len(left)
	}
	return c
}

// measure counts objects and what they hold.
func (d *demo) measure(ctx context.Context) error {
	census, err := censusOf(ctx, d.admin, demoTopic, demoPartitions)
	if err != nil {
		return err
	}
	d.result.Objects = len(census.objects)
	d.result.BytesPerObject, d.result.PartitionsPerObject = census.perObject()
	d.say("In the bucket: %d ranges in %d objects, on average %.0f bytes and %.1f partitions in each.",
		census.ranges, d.result.Objects, d.result.BytesPerObject, d.result.PartitionsPerObject)
	if len(d.result.problems()) == 0 {
		d.say("lost=%d duplicated=%d reordered=%d", d.result.Lost, d.result.Duplicated, d.result.Reordered)
	}
	return nil
}
