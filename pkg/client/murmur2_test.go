package client

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The vectors are those of Kafka's own test of its hash.
func TestMurmur2IsKafkas(t *testing.T) {
	for text, want := range map[string]int32{
		"21":                         -973932308,
		"foobar":                     -790332482,
		"a-little-bit-long-string":   -985981536,
		"a-little-bit-longer-string": -1486304829,
		"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
		"abc": 479470107,
	} {
		require.Equal(t, want, int32(murmur2([]byte(text))), text)
	}
}

func TestPartitionForKeyAgreesWithAnotherClient(t *testing.T) {
	other := kgo.StickyKeyPartitioner(nil).ForTopic("t")
	for i := range 2000 {
		key := []byte(fmt.Sprintf("k%d", i*i))[:1+i%len(fmt.Sprintf("k%d", i*i))]
		n := 1 + i%37
		require.EqualValues(t, other.Partition(&kgo.Record{Key: key}, n), PartitionForKey(key, n), "key %q of %d", key, n)
	}
	require.EqualValues(t, other.Partition(&kgo.Record{Key: []byte{}}, 12), PartitionForKey([]byte{}, 12), "an empty key is a key")
}
