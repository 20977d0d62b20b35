package commitlog

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sort"
	"strconv"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	lockName       = "LOCK"
	brokerName     = "broker.json"
	cleanName      = "clean-shutdown.json"
	runName        = "run.json"
	removedSuffix  = ".removed"
	bootIDPath     = "/proc/sys/kernel/random/boot_id"
	maxBootIDBytes = 64
)

// Owner says whose data directory it is.
type Owner struct {
	// ClusterID is the id of the cluster, 1 to 255 bytes.
	ClusterID string
	// BrokerID is the broker's id, 0 or more.
	BrokerID int32
}

// Start says how the last run of the broker ended: the proof of an intact log
// that a registration names.
type Start struct {
	// Created says that the directory was empty.
	Created bool
	// Clean says that the clean-shutdown mark was there. It has been removed:
	// a crash from now on leaves none.
	Clean bool
	// SameBoot says that the kernel has not been restarted since the last run
	// began, so the page cache it wrote to is still the same. With
	// RecoveryReport.Intact that too proves a log whole. False when either
	// boot id is unknown.
	SameBoot bool
}

// DataDir is a broker's data directory, held exclusively. Its methods may be
// called by any goroutine. It knows the logs below it only as directories; who
// opened a log closes it before the DataDir.
type DataDir struct {
	fs     vfs.FS
	dir    string
	owner  Owner
	start  Start
	bootID string

	mu     sync.Mutex // guards lock
	lock   io.Closer
	closed bool
}

type brokerFile struct {
	Format    int    `json:"format_version"`
	ClusterID string `json:"cluster_id"`
	BrokerID  int32  `json:"broker_id"`
}

type bootFile struct {
	Format int    `json:"format_version"`
	BootID string `json:"boot_id"`
}

// OpenDataDir takes the exclusive lock of a data directory, making the
// directory if it is not there, checks that it is the owner's, and takes the
// clean-shutdown mark away before anything is loaded. bootID is the kernel's
// boot id (KernelBootID), empty if unknown. A directory held by another process
// is a LockedError and nothing in it is changed; one of another cluster or
// broker is a MismatchError.
func OpenDataDir(fsys vfs.FS, dir string, owner Owner, bootID string) (*DataDir, error) {
	if owner.ClusterID == "" || len(owner.ClusterID) > maxIDBytes || owner.BrokerID < 0 {
		return nil, fmt.Errorf("commitlog: impossible owner %+v", owner)
	}
	if err := fsys.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("make %s: %w", dir, err)
	}
	lock, err := fsys.Lock(fsys.PathJoin(dir, lockName))
	if err != nil {
		return nil, &LockedError{Dir: dir, Err: err}
	}
	d := &DataDir{fs: fsys, dir: dir, owner: owner, bootID: bootID, lock: lock}
	if err := d.open(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return d, nil
}

func (d *DataDir) open() error {
	path := d.fs.PathJoin(d.dir, brokerName)
	var found brokerFile
	switch err := readJSON(d.fs, path, &found); {
	case errors.Is(err, fs.ErrNotExist):
		parts, _, err := d.list()
		if err != nil {
			return err
		}
		if len(parts) > 0 {
			return &FormatError{Path: path, Reason: "partitions without " + brokerName}
		}
		d.start.Created = true
		if err := syncDir(d.fs, d.fs.PathDir(d.dir)); err != nil {
			return err
		}
		if err := d.writeJSON(brokerName, brokerFile{Format: FormatVersion, ClusterID: d.owner.ClusterID, BrokerID: d.owner.BrokerID}); err != nil {
			return err
		}
	case err != nil:
		return err
	case found.Format < 1 || found.Format > FormatVersion:
		return &FormatError{Path: path, Reason: fmt.Sprintf("format version %d, this program knows %d", found.Format, FormatVersion)}
	case found.ClusterID != d.owner.ClusterID:
		return &MismatchError{Path: path, Field: "cluster id", Want: strconv.Quote(d.owner.ClusterID), Got: strconv.Quote(found.ClusterID)}
	case found.BrokerID != d.owner.BrokerID:
		return &MismatchError{Path: path, Field: "broker id", Want: strconv.Itoa(int(d.owner.BrokerID)), Got: strconv.Itoa(int(found.BrokerID))}
	}

	// The mark goes before anything is loaded, so that a crash while loading is
	// not taken for a clean stop by the next start (KAFKA-10471).
	var mark bootFile
	err := readJSON(d.fs, d.fs.PathJoin(d.dir, cleanName), &mark)
	var bad *FormatError
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.As(err, &bad) {
		return err
	}
	d.start.Clean = err == nil
	if err := removeIfThere(d.fs, d.fs.PathJoin(d.dir, cleanName)); err != nil {
		return err
	}
	var run bootFile
	err = readJSON(d.fs, d.fs.PathJoin(d.dir, runName), &run)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.As(err, &bad) {
		return err
	}
	d.start.SameBoot = err == nil && d.bootID != "" && run.BootID == d.bootID
	// Also makes the removal of the mark durable.
	if err := d.writeJSON(runName, bootFile{Format: FormatVersion, BootID: d.bootID}); err != nil {
		return err
	}
	return d.finishRemovals()
}

func (d *DataDir) writeJSON(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	return writeAtomic(d.fs, d.dir, name, append(data, '\n'))
}

func readJSON(fsys vfs.FS, path string, v any) error {
	data, err := readSmall(fsys, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return &FormatError{Path: path, Reason: err.Error()}
	}
	return nil
}

// Start says how the last run ended.
func (d *DataDir) Start() Start { return d.start }

// Dir is the path of the directory.
func (d *DataDir) Dir() string { return d.dir }

// PartitionPath is where a partition's log lives.
func (d *DataDir) PartitionPath(topic TopicID, partition int32) string {
	return d.fs.PathJoin(d.dir, PartitionDirName(topic, partition))
}

// OpenLog opens a partition's log; trust in a clean shutdown and the cluster id
// are filled in.
func (d *DataDir) OpenLog(id Identity, opts Options) (*Log, RecoveryReport, error) {
	if err := d.check(); err != nil {
		return nil, RecoveryReport{}, err
	}
	id.ClusterID = d.owner.ClusterID
	opts.Trusted = d.start.Clean
	return Open(d.fs, d.PartitionPath(id.TopicID, id.Partition), id, opts)
}

func (d *DataDir) check() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	return nil
}

// PartitionDir names a partition found in a data directory.
type PartitionDir struct {
	TopicID   TopicID
	Partition int32
}

// Partitions lists the partition directories in order of their names. Other
// entries that are not the DataDir's own are listed by name in strangers: they
// are left alone, as are partitions that nobody asks for.
func (d *DataDir) Partitions() (found []PartitionDir, strangers []string, err error) {
	if err := d.check(); err != nil {
		return nil, nil, err
	}
	return d.list()
}

func (d *DataDir) list() (found []PartitionDir, strangers []string, err error) {
	names, err := d.fs.List(d.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("list %s: %w", d.dir, err)
	}
	sort.Strings(names)
	for _, name := range names {
		if topic, n, err := ParsePartitionDirName(name); err == nil {
			found = append(found, PartitionDir{TopicID: topic, Partition: n})
			continue
		}
		switch strings.TrimSuffix(name, tempSuffix) {
		case lockName, brokerName, cleanName, runName:
		default:
			if _, ok := removedName(name); !ok {
				strangers = append(strangers, name)
			}
		}
	}
	return found, strangers, nil
}

func removedName(name string) (string, bool) {
	part, ok := strings.CutSuffix(name, removedSuffix)
	if !ok {
		return "", false
	}
	_, _, err := ParsePartitionDirName(part)
	return part, err == nil
}

// RemovePartition deletes a partition's directory for good. It is called for a
// deletion that the metadata log names with this very topic id, and for nothing
// else: a directory that nobody knows is kept (field report B007). The log must
// be closed. It is durable on return; an absent directory is success.
func (d *DataDir) RemovePartition(topic TopicID, partition int32) error {
	if err := d.check(); err != nil {
		return err
	}
	path := d.PartitionPath(topic, partition)
	if _, err := d.fs.Stat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if err := d.fs.RemoveAll(path + removedSuffix); err != nil {
		return fmt.Errorf("remove %s: %w", path+removedSuffix, err)
	}
	// The rename is the commit point: a crash leaves the whole directory under
	// one name or the other, never half a log.
	if err := d.fs.Rename(path, path+removedSuffix); err != nil {
		return fmt.Errorf("rename %s: %w", path, err)
	}
	if err := syncDir(d.fs, d.dir); err != nil {
		return err
	}
	if err := d.fs.RemoveAll(path + removedSuffix); err != nil {
		return fmt.Errorf("remove %s: %w", path+removedSuffix, err)
	}
	return syncDir(d.fs, d.dir)
}

// maxQuarantined bounds the directories kept of one partition.
const maxQuarantined = 1000

// QuarantinePartition puts a partition's directory aside, whole and durably, so
// that a new log can begin in its place: for one that can't be opened any more.
// It returns the new path, which is a stranger from now on and never removed by
// this package. The log must be closed.
func (d *DataDir) QuarantinePartition(topic TopicID, partition int32) (string, error) {
	if err := d.check(); err != nil {
		return "", err
	}
	path := d.PartitionPath(topic, partition)
	for n := range maxQuarantined {
		aside := fmt.Sprintf("%s.damaged-%d", path, n)
		_, err := d.fs.Stat(aside)
		if err == nil {
			continue
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("stat %s: %w", aside, err)
		}
		if err := d.fs.Rename(path, aside); err != nil {
			return "", fmt.Errorf("rename %s: %w", path, err)
		}
		return aside, syncDir(d.fs, d.dir)
	}
	return "", fmt.Errorf("commitlog: %s was put aside %d times already", path, maxQuarantined)
}

// finishRemovals removes directories whose removal was decided.
func (d *DataDir) finishRemovals() error {
	names, err := d.fs.List(d.dir)
	if err != nil {
		return fmt.Errorf("list %s: %w", d.dir, err)
	}
	for _, name := range names {
		if _, ok := removedName(name); ok {
			if err := d.fs.RemoveAll(d.fs.PathJoin(d.dir, name)); err != nil {
				return fmt.Errorf("remove %s: %w", name, err)
			}
		}
	}
	return nil
}

// Close gives the lock back. clean says that every log was closed without an
// error: then the clean-shutdown mark is written first.
func (d *DataDir) Close(clean bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	d.closed = true
	var err error
	if clean {
		err = d.writeJSON(cleanName, bootFile{Format: FormatVersion, BootID: d.bootID})
	}
	return errors.Join(err, d.lock.Close())
}

// KernelBootID reads the id that Linux draws at each boot; empty, without an
// error, where there is none.
func KernelBootID(fsys vfs.FS) (id string, err error) {
	f, err := fsys.Open(bootIDPath)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// The file says that it is empty, so its size can't be asked for.
	data, err := io.ReadAll(io.LimitReader(f, maxBootIDBytes))
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
