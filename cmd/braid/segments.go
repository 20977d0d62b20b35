package main

import (
	"context"
	"flag"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/braidlog/braid/pkg/client"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

func segmentsCommand() *command {
	return &command{
		name: "segments", args: "--topic T [flags]", summary: "list what of a topic is in the bucket, and in which objects",
		help: `
Lists the committed ranges of a topic's partitions, in order of offset, with the combined objects that hold them. One object
holds ranges of many partitions. With --json each range is a line {topic, partition, base_offset, end_offset, object, position,
length_bytes, object_size_bytes, max_timestamp_ms, leader_epoch, chain_hash}, and the last line is a summary.
` + targetHelp,
		run: runSegments,
	}
}

// segmentLine is a range as --json writes it. Ends are exclusive.
type segmentLine struct {
	Topic       string `json:"topic"`
	Partition   int32  `json:"partition"`
	Base        int64  `json:"base_offset"`
	End         int64  `json:"end_offset"`
	Object      string `json:"object"` // its name in the bucket
	Position    int64  `json:"position"`
	Length      int64  `json:"length_bytes"`
	ObjectSize  int64  `json:"object_size_bytes"`
	MaxTime     int64  `json:"max_timestamp_ms"`
	LeaderEpoch int32  `json:"leader_epoch"` // of the fence it was committed under
	ChainHash   string `json:"chain_hash"`   // at end_offset, hexadecimal
}

// segmentsSummary is the last line of `braid segments --json`, over the ranges
// listed.
type segmentsSummary struct {
	Topic               string  `json:"topic"`
	Partitions          int     `json:"partitions"`
	Ranges              int     `json:"ranges"`
	Objects             int     `json:"objects"`
	Bytes               int64   `json:"bytes"` // of the ranges
	BytesPerObject      float64 `json:"bytes_per_object"`
	PartitionsPerObject float64 `json:"partitions_per_object"`
}

// objectCensus counts objects over ranges.
type objectCensus struct {
	ranges  int
	bytes   int64
	objects map[string]*objectFacts
}

type objectFacts struct {
	size       int64
	partitions map[int32]bool
}

func (c *objectCensus) add(partition int32, r *metadatav1.SegmentRange) {
	if c.objects == nil {
		c.objects = map[string]*objectFacts{}
	}
	c.ranges++
	c.bytes += r.GetLengthBytes()
	o, ok := c.objects[r.GetObjectName()]
	if !ok {
		o = &objectFacts{size: r.GetObjectSizeBytes(), partitions: map[int32]bool{}}
		c.objects[r.GetObjectName()] = o
	}
	o.partitions[partition] = true
}

// perObject is the mean size of an object, and of how many partitions one holds
// ranges.
func (c *objectCensus) perObject() (bytes, partitions float64) {
	for _, o := range c.objects {
		bytes += float64(o.size)
		partitions += float64(len(o.partitions))
	}
	if n := float64(len(c.objects)); n > 0 {
		bytes, partitions = bytes/n, partitions/n
	}
	return bytes, partitions
}

// censusOf lists all ranges of a topic from an offset on.
func censusOf(ctx context.Context, admin *client.Admin, topic string, partitions int) (*objectCensus, error) {
	c := &objectCensus{}
	for p := range int32(partitions) {
		err := admin.ListSegments(ctx, topic, p, 0, func(r *metadatav1.SegmentRange) error {
			c.add(p, r)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

func runSegments(ctx context.Context, c *console, cmd *command, args []string) error {
	fs := flag.NewFlagSet("segments", flag.ContinueOnError)
	var t target
	t.register(fs)
	name := fs.String("topic", "", "`name` of the topic")
	only := fs.Int("partition", -1, "list only this `partition`")
	from := fs.Int64("offset", 0, "leave out ranges that end at or below this `offset`")
	asJSON := fs.Bool("json", false, "write ranges and a summary as JSON")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if *name, err = topicArg(*name, rest); err != nil {
		return err
	}
	admin, err := t.admin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = admin.Close() }() // it was only asked
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	resp, err := admin.Topics().GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: *name}})
	if err != nil {
		return ofTopic(*name, err)
	}
	n := len(resp.GetTopic().GetPartitions())
	if *only >= n {
		return fmt.Errorf("topic %s has no partition %d, only 0 to %d", *name, *only, n-1)
	}
	s := segmentsSummary{Topic: *name}
	var census objectCensus
	w := tabwriter.NewWriter(c.stdout, 0, 8, 2, ' ', 0)
	if !*asJSON {
		fmt.Fprintln(w, "PARTITION\tOFFSETS\tBYTES\tEPOCH\tPOSITION\tOBJECT")
	}
	for p := range int32(n) {
		if *only >= 0 && int32(*only) != p {
			continue
		}
		s.Partitions++
		err := admin.ListSegments(ctx, *name, p, *from, func(r *metadatav1.SegmentRange) error {
			census.add(p, r)
			if *asJSON {
				return c.printJSON(segmentLine{
					Topic: *name, Partition: p, Base: r.GetBaseOffset(), End: r.GetEndOffset(), Object: r.GetObjectName(),
					Position: r.GetPosition(), Length: r.GetLengthBytes(), ObjectSize: r.GetObjectSizeBytes(),
					MaxTime: r.GetMaxTimestampMs(), LeaderEpoch: r.GetLeaderEpoch(), ChainHash: fmt.Sprintf("%x", r.GetEndChainHash()),
				})
			}
			_, err := fmt.Fprintf(w, "%d\t[%d, %d)\t%d\t%d\t%d\t%s\n", p, r.GetBaseOffset(), r.GetEndOffset(), r.GetLengthBytes(), r.GetLeaderEpoch(), r.GetPosition(), r.GetObjectName())
			return err
		})
		if err != nil {
			return err
		}
	}
	s.Ranges, s.Objects, s.Bytes = census.ranges, len(census.objects), census.bytes
	s.BytesPerObject, s.PartitionsPerObject = census.perObject()
	if *asJSON {
		return c.printJSON(s)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(c.stdout, "%s of %s in %s: %.0f bytes and %.2f partitions per object\n",
		count(s.Ranges, "range"), count(s.Partitions, "partition"), count(s.Objects, "object"), s.BytesPerObject, s.PartitionsPerObject)
	return nil
}
