package producerstate_test

import (
	"encoding/binary"
	"hash/crc32"
	"slices"
)

// fixChecksum lets the fuzzer get behind the checksum.
func fixChecksum(data []byte) []byte {
	if len(data) < 4 {
		return data
	}
	data = slices.Clone(data)
	binary.BigEndian.PutUint32(data[len(data)-4:], crc32.Checksum(data[:len(data)-4], crc32.MakeTable(crc32.Castagnoli)))
	return data
}
