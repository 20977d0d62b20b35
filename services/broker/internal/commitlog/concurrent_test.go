package commitlog_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

// Readers run while one writer appends, rolls, truncates, resets and raises the
// start and another goroutine syncs. What they read is always whole, valid and
// contiguous, and nothing is ever reported as damage.
func TestReadersSeeOnlyValidBatchesWhileTheLogIsChanged(t *testing.T) {
	for name, fs := range map[string]vfs.FS{"mem": newFS(t), "disk": vfs.Default} {
		t.Run(name, func(t *testing.T) {
			dir, steps := testDir, 3000
			if fs == vfs.Default {
				dir, steps = t.TempDir()+"/p", 500
			}
			l, _, err := commitlog.Open(fs, dir, testID, commitlog.Options{SegmentBytes: 4000, IndexInterval: 500})
			require.NoError(t, err)
			require.NoError(t, l.AppendLineage(entry(1, 0)))
			var stop atomic.Bool
			var reads atomic.Int64
			var wg sync.WaitGroup
			failures := make(chan error, 8)
			loop := func(f func(i int) error) {
				wg.Go(func() {
					for i := 0; !stop.Load(); i++ {
						if err := f(i); err != nil {
							failures <- err
							return
						}
					}
				})
			}
			for range 2 {
				buf := make([]byte, 0, 1<<12)
				at := int64(0)
				loop(func(i int) error {
					c, err := l.Read(buf, commitlog.ReadRequest{Offset: at, MaxBytes: 1500})
					var out *commitlog.OutOfRangeError
					if errors.As(err, &out) {
						at = out.Start
						return nil
					}
					if err != nil {
						return fmt.Errorf("read at %d: %w", at, err)
					}
					next := c.Base
					for b, err := range record.Batches(c.Bytes) {
						if err == nil {
							err = b.Validate()
						}
						if err != nil || b.BaseOffset() != next {
							return fmt.Errorf("batch at %d, expected %d: %w", b.BaseOffset(), next, err)
						}
						next = b.EndOffset()
					}
					if next != c.End {
						return fmt.Errorf("chunk ends at %d, its batches at %d", c.End, next)
					}
					at = c.End
					if at >= l.End() {
						at = l.Start()
					}
					reads.Add(1)
					return nil
				})
			}
			loop(func(i int) error {
				end := l.End()
				_, _, err := l.FloorBorder(end - int64(i%50))
				var out *commitlog.OutOfRangeError
				var inside *commitlog.NotBorderError
				if err != nil && !errors.As(err, &out) && !errors.As(err, &inside) {
					return fmt.Errorf("floor border: %w", err)
				}
				_, _, err = l.OffsetForTime(int64(i % 3000))
				if err != nil {
					return fmt.Errorf("offset for time: %w", err)
				}
				return nil
			})
			loop(func(int) error { return l.Sync() })

			r := rng(11)
			epoch := int32(1)
			for i := 0; i < steps && len(failures) == 0; i++ {
				switch k := r.IntN(60); {
				case k == 0 && l.End() > l.Start():
					to, _, err := l.FloorBorder(l.Start() + r.Int64N(l.End()-l.Start()))
					require.NoError(t, err)
					if to < l.Start() {
						continue
					}
					require.NoError(t, l.TruncateTo(to))
					epoch++
					require.NoError(t, l.AppendLineage(entry(epoch, to)))
				case k == 1:
					require.NoError(t, l.AdvanceStart(l.Start()+(l.End()-l.Start())/3))
				case k == 2 && i%5 == 0:
					epoch++
					at := r.Int64N(1000)
					require.NoError(t, l.Reset(at, [16]byte{1}, append(l.Lineage()[:0:0], entry(epoch, at))))
				default:
					end := l.End()
					b := batch(t, end, epoch, 1+r.IntN(4), r.IntN(200), r.Int64N(3000))
					_, err := l.Append(b, commitlog.Position{Offset: end}, testNow)
					require.NoError(t, err)
				}
			}
			stop.Store(true)
			wg.Wait()
			close(failures)
			for err := range failures {
				t.Error(err)
			}
			require.NoError(t, l.Close())
			require.Positive(t, reads.Load())
		})
	}
}
