package commitlog

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
)

// FormatVersion is the version of the files of a partition directory written by
// this code. A directory with a higher one is refused.
const FormatVersion = 1

const (
	metaName       = "partition.meta"
	checkpointName = "log.checkpoint"
	logSuffix      = ".log"
	indexSuffix    = ".index"
	tempSuffix     = ".tmp"

	metaMagic  = "BRAIDPM1"
	maxIDBytes = 255
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// TopicID identifies a topic; names are labels.
type TopicID [16]byte

// String gives the id as a lower-case UUID.
func (t TopicID) String() string {
	var b [36]byte
	hex.Encode(b[0:8], t[0:4])
	b[8] = '-'
	hex.Encode(b[9:13], t[4:6])
	b[13] = '-'
	hex.Encode(b[14:18], t[6:8])
	b[18] = '-'
	hex.Encode(b[19:23], t[8:10])
	b[23] = '-'
	hex.Encode(b[24:36], t[10:16])
	return string(b[:])
}

// ParseTopicID reads what String writes, and nothing else.
func ParseTopicID(s string) (TopicID, error) {
	var t TopicID
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' || strings.ToLower(s) != s {
		return t, fmt.Errorf("commitlog: %q is not a topic id", s)
	}
	digits := s[0:8] + s[9:13] + s[14:18] + s[19:23] + s[24:36]
	if _, err := hex.Decode(t[:], []byte(digits)); err != nil {
		return t, fmt.Errorf("commitlog: %q is not a topic id: %w", s, err)
	}
	return t, nil
}

// Identity says what a partition directory holds.
type Identity struct {
	// ClusterID is the id of the cluster the broker belongs to, 1 to 255 bytes.
	ClusterID string
	// TopicID is the topic's id.
	TopicID TopicID
	// CreationOffset is the offset of the topic's creation in the metadata log:
	// it tells two lives of one topic id apart.
	CreationOffset int64
	// Partition counts from 0.
	Partition int32
}

// DirName is the directory's name below the data directory.
func (id Identity) DirName() string { return PartitionDirName(id.TopicID, id.Partition) }

// PartitionDirName is "<topic uuid>-<partition>".
func PartitionDirName(topic TopicID, partition int32) string {
	return topic.String() + "-" + strconv.FormatInt(int64(partition), 10)
}

// ParsePartitionDirName reads what PartitionDirName writes, and nothing else.
func ParsePartitionDirName(name string) (TopicID, int32, error) {
	if len(name) < 38 || name[36] != '-' {
		return TopicID{}, 0, fmt.Errorf("commitlog: %q is not a partition directory", name)
	}
	topic, err := ParseTopicID(name[:36])
	if err != nil {
		return TopicID{}, 0, err
	}
	n, err := strconv.ParseInt(name[37:], 10, 32)
	if err != nil || n < 0 || PartitionDirName(topic, int32(n)) != name {
		return TopicID{}, 0, fmt.Errorf("commitlog: %q is not a partition directory", name)
	}
	return topic, int32(n), nil
}

func (id Identity) validate() error {
	if id.ClusterID == "" || len(id.ClusterID) > maxIDBytes {
		return fmt.Errorf("commitlog: cluster id must have 1 to %d bytes, has %d", maxIDBytes, len(id.ClusterID))
	}
	if id.Partition < 0 || id.CreationOffset < 0 {
		return fmt.Errorf("commitlog: partition %d and creation offset %d must not be negative", id.Partition, id.CreationOffset)
	}
	return nil
}

// check compares what a directory holds with what the caller expects.
func (id Identity) check(path string, want Identity) error {
	mismatch := func(field, want, got string) error {
		return &MismatchError{Path: path, Field: field, Want: want, Got: got}
	}
	switch {
	case id.ClusterID != want.ClusterID:
		return mismatch("cluster id", strconv.Quote(want.ClusterID), strconv.Quote(id.ClusterID))
	case id.TopicID != want.TopicID:
		return mismatch("topic id", want.TopicID.String(), id.TopicID.String())
	case id.CreationOffset != want.CreationOffset:
		return mismatch("creation offset", strconv.FormatInt(want.CreationOffset, 10), strconv.FormatInt(id.CreationOffset, 10))
	case id.Partition != want.Partition:
		return mismatch("partition", strconv.Itoa(int(want.Partition)), strconv.Itoa(int(id.Partition)))
	}
	return nil
}

// encodeMeta gives the bytes of partition.meta.
func encodeMeta(id Identity) []byte {
	b := make([]byte, 0, 64+len(id.ClusterID))
	b = append(b, metaMagic...)
	b = binary.BigEndian.AppendUint32(b, FormatVersion)
	b = append(b, id.TopicID[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(id.CreationOffset))
	b = binary.BigEndian.AppendUint32(b, uint32(id.Partition))
	b = append(b, byte(len(id.ClusterID)))
	b = append(b, id.ClusterID...)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// decodeMeta reads what encodeMeta writes.
func decodeMeta(b []byte) (Identity, error) {
	const fixed = 8 + 4 + 16 + 8 + 4 + 1
	body, err := checkedBody(b, metaMagic, fixed)
	if err != nil {
		return Identity{}, err
	}
	var id Identity
	copy(id.TopicID[:], body[12:28])
	id.CreationOffset = int64(binary.BigEndian.Uint64(body[28:36]))
	id.Partition = int32(binary.BigEndian.Uint32(body[36:40]))
	if len(body) != fixed+int(body[40]) {
		return Identity{}, &FormatError{Reason: "wrong length"}
	}
	id.ClusterID = string(body[fixed:])
	if err := id.validate(); err != nil {
		return Identity{}, &FormatError{Reason: err.Error()}
	}
	return id, nil
}

// checkedBody checks magic, version, least length and the CRC32C at the end,
// and gives what precedes the CRC.
func checkedBody(b []byte, magic string, least int) ([]byte, error) {
	if len(b) < least+4 || len(b) < len(magic)+8 {
		return nil, &FormatError{Reason: fmt.Sprintf("%d bytes are too few", len(b))}
	}
	if string(b[:len(magic)]) != magic {
		return nil, &FormatError{Reason: "wrong magic"}
	}
	body, sum := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return nil, &FormatError{Reason: "checksum does not fit"}
	}
	if v := binary.BigEndian.Uint32(b[len(magic):]); v == 0 || v > FormatVersion {
		return nil, &FormatError{Reason: fmt.Sprintf("format version %d, this program knows %d", v, FormatVersion)}
	}
	return body, nil
}
