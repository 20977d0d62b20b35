package main

import (
	"context"
	"flag"
	"fmt"
	"sort"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// topicInfo is a topic as --json writes it.
type topicInfo struct {
	Name           string            `json:"name"`
	ID             string            `json:"topic_id"`
	CreationOffset int64             `json:"creation_offset"` // in the metadata log
	Configs        map[string]string `json:"configs"`         // that differ from the defaults
	Partitions     []partitionInfo   `json:"partitions"`
}

// partitionInfo is a partition as --json writes it. Ends are exclusive.
type partitionInfo struct {
	Partition   int32   `json:"partition"`
	Leader      int32   `json:"leader"` // broker id, 0 for none
	LeaderEpoch int32   `json:"leader_epoch"`
	Opened      bool    `json:"opened"`
	Replicas    []int32 `json:"replicas"`
	LogStart    int64   `json:"log_start_offset"`
	ObjectEnd   int64   `json:"object_end_offset"`
	Ranges      int64   `json:"ranges"`
	ObjectBytes int64   `json:"object_bytes"`
}

func topicOf(t *metadatav1.Topic) topicInfo {
	out := topicInfo{Name: t.GetName(), ID: t.GetTopicId(), CreationOffset: t.GetCreationOffset(), Configs: t.GetConfigs(), Partitions: []partitionInfo{}}
	if out.Configs == nil {
		out.Configs = map[string]string{}
	}
	for _, p := range t.GetPartitions() {
		replicas := p.GetReplicaIds()
		if replicas == nil {
			replicas = []int32{}
		}
		out.Partitions = append(out.Partitions, partitionInfo{
			Partition: p.GetPartition(), Leader: p.GetLeaderId(), LeaderEpoch: p.GetFence().GetLeaderEpoch(), Opened: p.GetOpened(),
			Replicas: replicas, LogStart: p.GetLogStartOffset(), ObjectEnd: p.GetObjectEndOffset(),
			Ranges: p.GetRangeCount(), ObjectBytes: p.GetObjectBytes(),
		})
	}
	return out
}

func topicCommand() *command {
	return &command{
		name: "topic", args: "create|list|describe|set|reassign|delete [NAME] [flags]", summary: "create, list, describe, change and delete topics",
		help: `
  create NAME [--partitions N] [--replicas N] [--config name=value …]   create a topic and wait for its leaders
  list                                                                  list all topics
  describe NAME                                                         show partitions, leaders and what is in the bucket
  set NAME --config name=value … [--unset name …]                       change settings
  reassign NAME --partition N --to 3,1,2                                name the brokers that hold a partition, the preferred leader first
  delete NAME                                                           end a topic's life

Settings:
` + settingsHelp() + targetHelp,
		run: runTopic,
	}
}

func settingsHelp() string {
	var b strings.Builder
	for _, d := range topicconfig.Describe() {
		fmt.Fprintf(&b, "  %-26s %s (default %s; %s)\n", d.Name, d.Meaning, d.Default, d.Allowed)
	}
	return b.String()
}

type topicFlags struct {
	target
	topic                string
	partitions, replicas int
	configs, unset       listFlag
	reassign             reassignFlags
	wait                 time.Duration
	json                 bool
}

func runTopic(ctx context.Context, c *console, cmd *command, args []string) error {
	fs := flag.NewFlagSet("topic", flag.ContinueOnError)
	var f topicFlags
	f.register(fs)
	fs.StringVar(&f.topic, "topic", "", "`name` of the topic, instead of the argument")
	fs.IntVar(&f.partitions, "partitions", 1, "create: `number` of partitions")
	fs.IntVar(&f.replicas, "replicas", 0, "create: `number` of brokers that may hold each partition; 0 is 3, or all when there are fewer")
	fs.Var(&f.configs, "config", "create, set: a setting, `name=value`; may be repeated")
	fs.Var(&f.unset, "unset", "set: `name` of a setting to return to its default; may be repeated")
	f.reassign.register(fs)
	fs.DurationVar(&f.wait, "wait", 10*time.Second, "create: how long to wait for the leaders")
	fs.BoolVar(&f.json, "json", false, "write topics as JSON: {name, topic_id, creation_offset, configs, partitions}")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if len(rest) == 0 {
		return usagef("say what to do: create, list, describe, set, reassign or delete")
	}
	verbs := map[string]func(context.Context, *console, *client.Admin, *topicFlags) error{
		"create": topicCreate, "list": topicList, "describe": topicDescribe, "set": topicSet, "reassign": topicReassign, "delete": topicDelete,
	}
	verb, ok := verbs[rest[0]]
	if !ok {
		return usagef("there is no %q: must be create, list, describe, set, reassign or delete", rest[0])
	}
	if rest[0] == "list" {
		err = noArgs(rest[1:])
	} else {
		f.topic, err = topicArg(f.topic, rest[1:])
	}
	if err != nil {
		return err
	}
	if rest[0] == "reassign" {
		// Before anybody is asked, like all that can be known without.
		if _, err := brokerIDs(f.reassign.to); err != nil {
			return err
		}
	}
	admin, err := f.admin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = admin.Close() }() // every answer is in by then
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return verb(ctx, c, admin, &f)
}

func settings(list listFlag) (map[string]string, error) {
	out := map[string]string{}
	for _, s := range list {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usagef("--config %q: must be name=value", s)
		}
		out[name] = value
	}
	return out, nil
}

func topicCreate(ctx context.Context, c *console, admin *client.Admin, f *topicFlags) error {
	configs, err := settings(f.configs)
	if err != nil {
		return err
	}
	resp, err := admin.Topics().CreateTopic(ctx, &metadatav1.CreateTopicRequest{
		Name: f.topic, PartitionCount: int32(f.partitions), ReplicationFactor: int32(f.replicas), Configs: configs,
	})
	if err != nil {
		return err
	}
	topic, err := awaitLeaders(ctx, admin, resp.GetTopic(), f.wait)
	if err != nil {
		fmt.Fprintf(c.stderr, "the topic was created, but not all its leaders are there: %s\n", explainError(err))
	}
	if f.json {
		return c.printJSON(topicOf(topic))
	}
	fmt.Fprintf(c.stdout, "topic %s created with %s (id %s)\n", topic.GetName(), count(len(topic.GetPartitions()), "partition"), topic.GetTopicId())
	return nil
}

// awaitLeaders waits until every partition of a topic is open.
func awaitLeaders(ctx context.Context, admin *client.Admin, topic *metadatav1.Topic, wait time.Duration) (*metadatav1.Topic, error) {
	if wait <= 0 {
		return topic, nil
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := admin.Topics().GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: topic.GetName()}})
		if err != nil && ctx.Err() == nil {
			return topic, err
		}
		waiting := -1
		if err == nil {
			topic = resp.GetTopic()
			for i, p := range topic.GetPartitions() {
				if !p.GetOpened() {
					waiting = i
				}
			}
			if waiting < 0 {
				return topic, nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return topic, fmt.Errorf("partition %d has not opened within %s", max(waiting, 0), wait)
		}
	}
}

func topicList(ctx context.Context, c *console, admin *client.Admin, f *topicFlags) error {
	topics, err := admin.ListTopics(ctx)
	if err != nil {
		return err
	}
	if f.json {
		out := make([]topicInfo, len(topics))
		for i, t := range topics {
			out[i] = topicOf(t)
		}
		return c.printJSON(struct {
			Topics []topicInfo `json:"topics"`
		}{out})
	}
	w := tabwriter.NewWriter(c.stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "TOPIC\tPARTITIONS\tOFFSETS IN BUCKET\tBYTES IN BUCKET\tID")
	for _, t := range topics {
		var end, bytes int64
		for _, p := range t.GetPartitions() {
			end += p.GetObjectEndOffset() - p.GetLogStartOffset()
			bytes += p.GetObjectBytes()
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\n", t.GetName(), len(t.GetPartitions()), end, bytes, t.GetTopicId())
	}
	return w.Flush()
}

func topicDescribe(ctx context.Context, c *console, admin *client.Admin, f *topicFlags) error {
	resp, err := admin.Topics().GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: f.topic}})
	if err != nil {
		return ofTopic(f.topic, err)
	}
	info := topicOf(resp.GetTopic())
	if f.json {
		return c.printJSON(info)
	}
	fmt.Fprintf(c.stdout, "topic %s, id %s, created at metadata offset %d\n", info.Name, info.ID, info.CreationOffset)
	for _, name := range sortedKeys(info.Configs) {
		fmt.Fprintf(c.stdout, "  %s = %s\n", name, info.Configs[name])
	}
	w := tabwriter.NewWriter(c.stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "PARTITION\tLEADER\tEPOCH\tSTATE\tREPLICAS\tLOG START\tOBJECT END\tRANGES\tBYTES")
	for _, p := range info.Partitions {
		state := "open"
		if !p.Opened {
			state = "opening"
		}
		if p.Leader == 0 {
			state = "no leader"
		}
		fmt.Fprintf(w, "%d\t%d\t%d\t%s\t%v\t%d\t%d\t%d\t%d\n", p.Partition, p.Leader, p.LeaderEpoch, state, p.Replicas, p.LogStart, p.ObjectEnd, p.Ranges, p.ObjectBytes)
	}
	return w.Flush()
}

func topicSet(ctx context.Context, c *console, admin *client.Admin, f *topicFlags) error {
	set, err := settings(f.configs)
	if err != nil {
		return err
	}
	if len(set) == 0 && len(f.unset) == 0 {
		return usagef("name what to change with --config name=value or --unset name")
	}
	resp, err := admin.Topics().UpdateTopic(ctx, &metadatav1.UpdateTopicRequest{Name: f.topic, Set: set, Unset: f.unset})
	if err != nil {
		return ofTopic(f.topic, err)
	}
	info := topicOf(resp.GetTopic())
	if f.json {
		return c.printJSON(info)
	}
	fmt.Fprintf(c.stdout, "topic %s changed\n", info.Name)
	for _, name := range sortedKeys(info.Configs) {
		fmt.Fprintf(c.stdout, "  %s = %s\n", name, info.Configs[name])
	}
	return nil
}

func topicDelete(ctx context.Context, c *console, admin *client.Admin, f *topicFlags) error {
	resp, err := admin.Topics().DeleteTopic(ctx, &metadatav1.DeleteTopicRequest{Name: f.topic})
	if err != nil {
		return ofTopic(f.topic, err)
	}
	if f.json {
		return c.printJSON(struct {
			Deleted        string `json:"deleted"`
			MetadataOffset int64  `json:"metadata_offset"`
		}{f.topic, resp.GetMetadataOffset()})
	}
	fmt.Fprintf(c.stdout, "topic %s deleted\n", f.topic)
	return nil
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
