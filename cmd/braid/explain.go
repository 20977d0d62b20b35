package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"time"

	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

func explainCommand() *command {
	return &command{
		name: "explain", args: "--topic T [--partition P] [flags]", summary: "say why a partition moves or does not move, with evidence",
		help: `
Asks each partition's leader what state it is in, and why it does not move: no leader, no remote-log manager, a slow bucket,
fenced, behind, a full backlog… Exit code 1 when something stops one of them. With --json each partition is a line
{topic, partition, broker, leader, state, leader_epoch, log_start_offset, local_log_start_offset, object_end_offset,
high_watermark, log_end_offset, unuploaded_bytes, rlm, producers, findings:[{code, summary, blocking, evidence}]}.
` + targetHelp,
		run: runExplain,
	}
}

// explainLine is a partition as --json writes it. Ends are exclusive.
type explainLine struct {
	Topic           string        `json:"topic"`
	Partition       int32         `json:"partition"`
	Broker          int32         `json:"broker"` // that answered
	Leader          int32         `json:"leader"` // 0 for none
	State           string        `json:"state"`  // on the broker that answered
	LeaderEpoch     int32         `json:"leader_epoch"`
	LogStart        int64         `json:"log_start_offset"`
	LocalLogStart   int64         `json:"local_log_start_offset"`
	ObjectEnd       int64         `json:"object_end_offset"`
	HighWatermark   int64         `json:"high_watermark"`
	LogEnd          int64         `json:"log_end_offset"`
	UnuploadedBytes int64         `json:"unuploaded_bytes"`
	RLM             int32         `json:"rlm"` // in use, 0 for none
	Producers       int32         `json:"producers"`
	Findings        []findingLine `json:"findings"`
}

type findingLine struct {
	Code     string            `json:"code"`
	Summary  string            `json:"summary"`
	Blocking bool              `json:"blocking"`
	Evidence map[string]string `json:"evidence"`
}

func explainOf(topic string, partition int32, r *brokerv1.ExplainPartitionResponse) explainLine {
	out := explainLine{
		Topic: topic, Partition: partition, Broker: r.GetBrokerId(), Leader: r.GetLeaderId(),
		State:       strings.TrimPrefix(r.GetState().String(), "REPLICA_STATE_"),
		LeaderEpoch: r.GetFence().GetLeaderEpoch(), LogStart: r.GetLogStartOffset(), LocalLogStart: r.GetLocalLogStartOffset(),
		ObjectEnd: r.GetObjectEndOffset(), HighWatermark: r.GetHighWatermark(), LogEnd: r.GetLogEndOffset(),
		UnuploadedBytes: r.GetUnuploadedBytes(), RLM: r.GetRlmId(), Producers: r.GetProducerCount(), Findings: []findingLine{},
	}
	for _, f := range r.GetFindings() {
		evidence := f.GetEvidence()
		if evidence == nil {
			evidence = map[string]string{}
		}
		out.Findings = append(out.Findings, findingLine{Code: f.GetCode(), Summary: f.GetSummary(), Blocking: f.GetBlocking(), Evidence: evidence})
	}
	return out
}

func runExplain(ctx context.Context, c *console, cmd *command, args []string) error {
	fs := flag.NewFlagSet("explain", flag.ContinueOnError)
	var t target
	t.register(fs)
	name := fs.String("topic", "", "`name` of the topic")
	only := fs.Int("partition", -1, "only this `partition`")
	asJSON := fs.Bool("json", false, "write a line of JSON for each partition")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if *name, err = topicArg(*name, rest); err != nil {
		return err
	}
	cl, err := t.client()
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }() // it was only asked
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	topic, err := cl.DescribeTopic(ctx, *name)
	if err != nil {
		return err
	}
	if *only >= len(topic.Partitions) {
		return fmt.Errorf("topic %s has no partition %d, only 0 to %d", *name, *only, len(topic.Partitions)-1)
	}
	blocked := 0
	for p := range int32(len(topic.Partitions)) {
		if *only >= 0 && int32(*only) != p {
			continue
		}
		resp, err := cl.Explain(ctx, *name, p)
		if err != nil {
			return err
		}
		line := explainOf(*name, p, resp)
		stops := false
		for _, f := range line.Findings {
			stops = stops || f.Blocking
		}
		if stops {
			blocked++
		}
		if *asJSON {
			err = c.printJSON(line)
		} else {
			tellExplained(c, line)
		}
		if err != nil {
			return err
		}
	}
	if blocked > 0 {
		if !*asJSON {
			fmt.Fprintf(c.stdout, "%s blocked\n", count(blocked, "partition"))
		}
		return errSilent
	}
	return nil
}

func tellExplained(c *console, l explainLine) {
	leader := fmt.Sprintf("led by broker %d in epoch %d", l.Leader, l.LeaderEpoch)
	if l.Leader == 0 {
		leader = "without a leader"
	}
	fmt.Fprintf(c.stdout, "%s/%d %s, %s: log [%d, %d), visible below %d, in the bucket below %d, on disk from %d, rlm %d\n",
		l.Topic, l.Partition, leader, l.State, l.LogStart, l.LogEnd, l.HighWatermark, l.ObjectEnd, l.LocalLogStart, l.RLM)
	for _, f := range l.Findings {
		mark := " "
		if f.Blocking {
			mark = "!"
		}
		fmt.Fprintf(c.stdout, "  %s %s: %s\n", mark, f.Code, f.Summary)
		for _, k := range sortedKeys(f.Evidence) {
			fmt.Fprintf(c.stdout, "      %s = %s\n", k, f.Evidence[k])
		}
	}
}
