package replica_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Field report B014: after one failed write the partition takes nothing more,
// gives leadership up, and the others go on.
func TestFailedWriteTakesOnePartitionOffline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 2)
		s.rlm(1, "a")
		var failing atomic.Bool
		fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
			if failing.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && strings.Contains(op.Path, topicID+"-0") && strings.HasSuffix(op.Path, ".log") {
				failing.Store(false) // exactly once
				return errors.New("input/output error")
			}
			return nil
		}))
		b := s.broker(1, fs)
		p, q := b.leading(0), b.leading(1)
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		failing.Store(true)
		_, err := add(t, p, batch(t, "y", 2), partition.Leader)
		var unknown *replica.OutcomeUnknownError
		require.ErrorAs(t, err, &unknown)
		require.EqualValues(t, 2, unknown.Base)
		until(t, "an election was asked for", func() bool {
			s.world.mu.Lock()
			defer s.world.mu.Unlock()
			return s.world.elections > 0
		})
		_, err = add(t, p, batch(t, "z", 2), partition.Leader)
		require.Error(t, err, "a later write may not pretend that nothing was lost")
		require.Equal(t, "LOG_OFFLINE", p.Explain().Findings[0].Code)
		// What is committed is still served, from the bucket.
		require.Equal(t, []string{"x-0", "x-1"}, values(t, p))
		mustAdd(t, q, batch(t, "other", 1), partition.Object)
		require.Zero(t, b.m.Unuploaded())

		// After a restart the log opens and leads again (B005).
		b.stop()
		b = s.broker(1, fs)
		p = b.leading(0)
		mustAdd(t, p, batch(t, "again", 1), partition.Object)
	})
}

// damage flips a byte in the log file of partition 0.
func damage(t *testing.T, fs vfs.FS, position int64) {
	t.Helper()
	path := fs.PathJoin("data", topicID+"-0", "00000000000000000000.log")
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], position)
	require.NoError(t, err)
	b[0] ^= 0x40
	_, err = f.WriteAt(b[:], position)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// I14: damaged local bytes are not served; what is committed comes from the
// bucket, and where the bucket does not have it either it is DATA_LOSS.
func TestDamagedLocalBytes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		fs := vfs.NewMem()
		b := s.broker(1, fs, func(c *replica.Config) { c.ReadCacheBytes = 0 })
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		mustAdd(t, p, batch(t, "y", 2), partition.Object)
		damage(t, fs, 70)
		require.Equal(t, []string{"x-0", "x-1", "y-0", "y-1"}, values(t, p))
		require.True(t, p.Offsets().Leading)

		// The bucket can't be reached: that is not a loss (I11).
		s.bucket.mu.Lock()
		s.bucket.fail = status.Error(codes.Unavailable, "down")
		s.bucket.mu.Unlock()
		_, err := p.Read(t.Context(), 0, 1<<20, nil)
		var unavailable *replica.UnavailableError
		require.ErrorAs(t, err, &unavailable)
		require.Equal(t, replica.ObjectStoreUnreachable, unavailable.Reason)
		// The object is gone: that is one.
		s.bucket.mu.Lock()
		s.bucket.fail = nil
		kept := s.bucket.objects
		s.bucket.objects = map[string]*object{}
		s.bucket.mu.Unlock()
		_, err = p.Read(t.Context(), 0, 1<<20, nil)
		var damaged *replica.DamagedError
		require.ErrorAs(t, err, &damaged)
		// The object's bytes are not those that were committed: so is that.
		s.bucket.mu.Lock()
		s.bucket.objects = kept
		for _, o := range kept {
			o.data[5] ^= 1 // in the base offset, which no batch CRC covers (F14)
		}
		s.bucket.mu.Unlock()
		_, err = p.Read(t.Context(), 0, 1<<20, nil)
		require.ErrorAs(t, err, &damaged)
		require.EqualValues(t, 0, damaged.Offset)
		// Without a manager nothing can be said.
		s.world.closeRLM(1)
		until(t, "no manager", func() bool {
			_, err = p.Read(t.Context(), 0, 1<<20, nil)
			return errors.As(err, &unavailable) && unavailable.Reason == replica.NoRemoteLogManager
		})
	})
}

// What is not uploaded and can't be read any more is lost: the leader does not
// cut it inside its own epoch (H2) but gives the partition up.
func TestDamageAboveTheObjectEndGivesThePartitionUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		fs := vfs.NewMem()
		b := s.broker(1, fs)
		p := b.leading(0)
		s.world.closeRLM(1)
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		res := mustAdd(t, p, batch(t, "x", 2), partition.Leader)
		damage(t, fs, 70)
		r.epoch = s.world.addRLM(1, "rlm:1", "a")
		until(t, "offline", func() bool { return p.Explain().State == partition.Offline })
		_, err := p.Await(t.Context(), res.End, res.Leadership, partition.Object)
		require.Error(t, err)
		require.Empty(t, r.ranges(), "nothing damaged was sent")
	})
}

// A LEADER-acked tail outlives damage below it that the bucket makes good: the
// log starts again at the object end, with the tail.
func TestTheTailBehindADamageIsKept(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		fs := vfs.NewCrashableMem()
		b := s.broker(1, fs)
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		mustAdd(t, p, sequenced(t, producerA, 0, 0, 2), partition.Object)
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "tail", 3), partition.Leader)
		mustAdd(t, p, sequenced(t, producerA, 0, 2, 2), partition.Leader)
		time.Sleep(2 * time.Second) //nolint:forbidigo // virtual time inside a bubble: the log is synced
		disk := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0, RNG: rand.New(rand.NewPCG(1, 2))})
		b.stop()
		r.cut()
		damage(t, disk, 70)
		p = s.broker(1, disk).leading(0)
		o := p.Offsets()
		require.EqualValues(t, 4, o.LocalLogStart)
		require.EqualValues(t, 9, o.LogEnd, "synced without waiting, and kept")
		requireDuplicate := func(sequence int32, base int64) {
			res := mustAdd(t, p, sequenced(t, producerA, 0, sequence, 2), partition.Leader)
			require.True(t, res.Duplicate)
			require.Equal(t, base, res.Base)
		}
		requireDuplicate(0, 2)
		requireDuplicate(2, 7)
		found := findings(p, "LOCAL_LOG_WAS_CUT")
		require.Len(t, found, 1)
		require.Equal(t, "0", found[0].Evidence["from"])
		require.Equal(t, "9", found[0].Evidence["to"])
		require.False(t, found[0].Blocking)
		r.up()
		until(t, "the tail is uploaded", func() bool { return s.world.objectEnd(0) == 9 })
		until(t, "visible", func() bool { return p.Offsets().HighWatermark == 9 })
		require.Len(t, values(t, p), 9)
	})
}

// Damage above what is synced: the log is cut, which is told.
func TestACutLogIsTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		fs := vfs.NewCrashableMem()
		b := s.broker(1, fs, func(c *replica.Config) { c.SyncInterval = 0 })
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		mustAdd(t, p, batch(t, "y", 2), partition.Object)
		disk := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 2))})
		b.stop()
		damage(t, disk, 70)
		b = s.broker(1, disk)
		p = b.leading(0)
		found := findings(p, "LOCAL_LOG_WAS_CUT")
		require.Len(t, found, 1)
		require.Equal(t, "0", found[0].Evidence["from"])
		require.NotEmpty(t, found[0].Evidence["files"])
		require.Len(t, values(t, p), 4)
		b.stop()
		p = s.broker(1, disk).leading(0)
		require.Empty(t, findings(p, "LOCAL_LOG_WAS_CUT"), "until the next start")
		require.Equal(t, "HEALTHY", p.Explain().Findings[0].Code)
	})
}

// H14: LEADER acks end with the session; OBJECT acks go on.
func TestNoLeaderAcksWithoutASession(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		res := mustAdd(t, p, batch(t, "x", 1), partition.Leader)
		require.Equal(t, []partition.Level{partition.Leader}, res.Levels[:1])
		s.world.with(func() { s.world.silent = true })
		time.Sleep(sessionTimeout + time.Second) //nolint:forbidigo // virtual time inside a bubble
		_, err := add(t, p, batch(t, "y", 1), partition.Leader)
		var unavailable *replica.UnavailableError
		require.ErrorAs(t, err, &unavailable)
		require.Equal(t, replica.MetadataUnreachable, unavailable.Reason)
		require.EqualValues(t, 1, p.Offsets().LogEnd, "nothing stored")
		res = mustAdd(t, p, batch(t, "z", 1), partition.Object)
		require.Equal(t, []partition.Level{partition.Object}, res.Levels)
		require.NotEmpty(t, findings(p, "SESSION_LOST"))
		require.Error(t, p.ConfirmLeadership(t.Context()))
		s.world.with(func() { s.world.silent = false })
		until(t, "confirmed again", func() bool {
			_, err := add(t, p, batch(t, "w", 1), partition.Leader)
			return err == nil
		})
		require.NoError(t, p.ConfirmLeadership(t.Context()))
	})
}

func TestBacklogIsCapped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 2)
		s.world.configs["wal.max.unuploaded.bytes"] = "1MiB"
		r := s.rlm(1, "a")
		r.with(func() { r.down = true })
		b := s.broker(1, vfs.NewMem(), func(c *replica.Config) { c.MaxUnuploadedBytes = 1536 * config.KiB })
		p, q := b.leading(0), b.leading(1)
		fillUp := func(p *replica.Partition) *replica.BacklogFullError {
			for {
				_, err := add(t, p, batch(t, strings.Repeat("f", 1000), 100), partition.Leader)
				var full *replica.BacklogFullError
				if errors.As(err, &full) {
					return full
				}
				require.NoError(t, err)
			}
		}
		full := fillUp(p)
		require.Equal(t, "partition", full.Scope)
		require.LessOrEqual(t, full.Unuploaded, full.Limit)
		end := p.Offsets().LogEnd
		full = fillUp(q)
		require.Equal(t, "broker", full.Scope)
		require.Equal(t, end, p.Offsets().LogEnd, "refused appends stored nothing")
		require.NotEmpty(t, p.Explain().Findings)
		r.up()
		until(t, "all uploaded", func() bool { return b.m.Unuploaded() == 0 })
		mustAdd(t, p, batch(t, "x", 1), partition.Object)
		for _, rg := range r.ranges() {
			require.LessOrEqual(t, len(rg.GetData()), 1<<20)
		}
	})
}

// I7: five in flight, all resent while the first ones are pending: the retries
// wait for the level of the originals, and nothing is stored twice.
func TestRepeatedBatchesInFlightWaitForTheOriginals(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 1), partition.Object)
		r.with(func() { r.down = true })
		ctx := t.Context()
		var tickets []*replica.Ticket
		var pipe replica.Pipeline
		for range 2 {
			for i := range 5 {
				in := replica.AppendInput{Batches: sequenced(t, producerA, 0, int32(i), 1), Level: partition.Object, Pipeline: &pipe}
				tickets = append(tickets, p.Enqueue(ctx, in))
			}
		}
		for _, ticket := range tickets {
			require.NoError(t, ticket.Admitted(ctx))
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := tickets[7].Wait(short)
		var unknown *replica.OutcomeUnknownError
		require.ErrorAs(t, err, &unknown)
		require.EqualValues(t, 3, unknown.Base)
		require.Equal(t, []partition.Level{partition.Leader}, unknown.Levels)
		r.up()
		for i, ticket := range tickets {
			if i == 7 {
				continue
			}
			res, err := ticket.Wait(ctx)
			require.NoError(t, err)
			require.EqualValues(t, 1+i%5, res.Base)
			require.Equal(t, i >= 5, res.Duplicate)
			require.Contains(t, res.Levels, partition.Object)
		}
		require.EqualValues(t, 6, p.Offsets().LogEnd)
	})
}

// The first refusal of a pipeline ends it: what was sent behind is not stored.
func TestFirstRefusalEndsAPipeline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		var pipe replica.Pipeline
		ctx := t.Context()
		one := p.Enqueue(ctx, replica.AppendInput{Batches: sequenced(t, producerA, 0, 0, 1), Pipeline: &pipe})
		two := p.Enqueue(ctx, replica.AppendInput{Batches: sequenced(t, producerA, 0, 5, 1), Pipeline: &pipe})
		three := p.Enqueue(ctx, replica.AppendInput{Batches: sequenced(t, producerA, 0, 1, 1), Pipeline: &pipe})
		_, err := one.Wait(ctx)
		require.NoError(t, err)
		var gap *replica.SequenceGapError
		_, err = two.Wait(ctx)
		require.ErrorAs(t, err, &gap)
		_, err = three.Wait(ctx)
		require.ErrorAs(t, err, new(*replica.PipelineBrokenError))
		require.EqualValues(t, 1, p.Offsets().LogEnd)
	})
}

func TestRefusalsBeforeTheAppendStoreNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		ctx := t.Context()
		submit := func(in replica.AppendInput) error {
			_, err := p.Submit(ctx, in)
			return err
		}
		require.ErrorAs(t, submit(replica.AppendInput{Batches: batch(t, "x", 1), Level: partition.Replicas}), new(*replica.LevelUnreachableError))
		require.ErrorAs(t, submit(replica.AppendInput{Batches: batch(t, "x", 1), ExpectedLeaderEpoch: 9}), new(*replica.FencedEpochError))
		require.ErrorAs(t, submit(replica.AppendInput{Batches: batch(t, strings.Repeat("x", 1<<20), 2)}), new(*replica.BatchTooLargeError))
		require.ErrorAs(t, submit(replica.AppendInput{Batches: []byte("nonsense that is long enough to have a header in it, is it not? no")}), new(*replica.InvalidBatchError))
		foreign := int64(incarnation+1)<<32 | 9
		require.ErrorAs(t, submit(replica.AppendInput{Batches: sequenced(t, foreign, 0, 0, 1)}), new(*replica.ProducerFencedError))
		require.ErrorAs(t, submit(replica.AppendInput{Batches: append(sequenced(t, producerA, 0, 0, 1), sequenced(t, producerA, 0, 2, 1)...)}), new(*replica.InvalidBatchError))
		canceled, cancel := context.WithCancel(ctx)
		cancel()
		_, err := p.Submit(canceled, replica.AppendInput{Batches: batch(t, "fine", 1)})
		require.NoError(t, err, "the writer was free: a context that ended later changes nothing")
		require.EqualValues(t, 1, p.Offsets().LogEnd)
		_, err = b.m.Lookup(topicName, 7)
		require.ErrorAs(t, err, new(*replica.UnknownPartitionError))
		_, err = b.m.Lookup("nothing", 0)
		require.ErrorAs(t, err, new(*replica.UnknownPartitionError))
	})
}

func TestDrainUploadsAndEndsTheSession(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		r.with(func() { r.down = true })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		ticket, err := p.Submit(ctx, replica.AppendInput{Batches: batch(t, "x", 1), Level: partition.Object})
		require.NoError(t, err)
		drained := make(chan error, 1)
		go func() { drained <- b.m.Drain(ctx) }()
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		_, err = add(t, p, batch(t, "late", 1), partition.Leader)
		require.ErrorIs(t, err, replica.ErrStopped)
		r.up()
		require.NoError(t, <-drained)
		_, err = ticket.Wait(ctx)
		require.NoError(t, err)
		s.world.with(func() { require.Equal(t, []int32{1}, s.world.stopped) })
	})
}

// Field report B007: only a deletion that was seen removes a directory.
func TestDeletedTopicLeavesTheDisk(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		fs := vfs.NewMem()
		b := s.broker(1, fs)
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 1), partition.Object)
		dir := fs.PathJoin("data", topicID+"-0")
		_, err := fs.Stat(dir)
		require.NoError(t, err)
		s.world.removeTopic()
		until(t, "gone from the disk", func() bool { _, err := fs.Stat(dir); return err != nil })
		_, err = add(t, p, batch(t, "y", 1), partition.Leader)
		require.ErrorAs(t, err, new(*replica.UnknownPartitionError))
		_, err = b.m.Lookup(topicName, 0)
		require.ErrorAs(t, err, new(*replica.UnknownPartitionError))
	})
}

func TestReadsAndOffsets(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		mustAdd(t, p, batch(t, "a", 3), partition.Object)
		first := time.Now().UnixMilli()
		time.Sleep(time.Minute) //nolint:forbidigo // virtual time inside a bubble
		mustAdd(t, p, batch(t, "b", 2), partition.Object)
		second := time.Now().UnixMilli()
		ctx := t.Context()
		got, err := p.Read(ctx, 1, 1, nil)
		require.NoError(t, err)
		require.EqualValues(t, 0, got.Base, "begins with the batch that holds the offset")
		require.EqualValues(t, 3, got.Next)
		_, err = p.Read(ctx, 6, 1, nil)
		require.ErrorAs(t, err, new(*replica.OffsetOutOfRangeError))
		offset, at, found, err := p.OffsetForTime(ctx, first+1)
		require.NoError(t, err)
		require.True(t, found)
		require.EqualValues(t, 3, offset)
		require.Equal(t, second, at)
		_, _, found, err = p.OffsetForTime(ctx, second+1)
		require.NoError(t, err)
		require.False(t, found)
		offset, at, found, err = p.MaxTimestamp(ctx)
		require.NoError(t, err)
		require.True(t, found)
		require.EqualValues(t, 3, offset)
		require.Equal(t, second, at)

		// Never at or above the high watermark (I4).
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "c", 1), partition.Leader)
		got, err = p.Read(ctx, 5, 1000, nil)
		require.NoError(t, err)
		require.Empty(t, got.Batches)
		require.EqualValues(t, 5, got.HighWatermark)
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		require.ErrorAs(t, p.WaitVisible(short, 5), new(*replica.UnavailableError))
		go func() { time.Sleep(time.Second); r.up() }() //nolint:forbidigo // virtual time inside a bubble
		require.NoError(t, p.WaitVisible(ctx, 5))
		require.Equal(t, []string{"a-0", "a-1", "a-2", "b-0", "b-1", "c-0"}, values(t, p))
		require.NoError(t, p.CheckPosition(5, p.Offsets().Lineage[0].Leadership))
	})
}
