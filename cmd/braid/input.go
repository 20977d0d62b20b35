package main

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// byteOrderMark is what some editors and spreadsheets begin UTF-8 text with.
const byteOrderMark = "\ufeff"

// markless is a stream without the byte order mark that it may begin with.
type markless struct {
	r     *bufio.Reader
	begun bool
}

func (m *markless) Read(p []byte) (int, error) {
	if !m.begun {
		m.begun = true
		// One byte at first: a stream may have only a few for a long time.
		if first, err := m.r.Peek(1); err == nil && first[0] == byteOrderMark[0] {
			if mark, err := m.r.Peek(len(byteOrderMark)); err == nil && string(mark) == byteOrderMark {
				_, _ = m.r.Discard(len(mark)) // it was peeked at
			}
		}
	}
	return m.r.Read(p)
}

// maxLine bounds one line of input: more can't be a record.
const maxLine = 64 << 20

// lineError says which line of the input is malformed.
type lineError struct {
	line int // from 1
	err  error
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %v", e.line, e.err) }
func (e *lineError) Unwrap() error { return e.err }

// inputRecord is a record of the input. Its slices are valid until the next.
type inputRecord struct {
	line       int // on which it begins, from 1
	key, value []byte
}

// input reads records of one format.
type input interface {
	// next returns the next record; io.EOF at the end, a *lineError for a
	// malformed line.
	next() (inputRecord, error)
}

func newInput(r io.Reader, format, key string) (input, error) {
	switch format {
	case "lines":
		if key != "" {
			return nil, usagef("--key needs --format jsonl or csv: a line has no fields")
		}
		return &lineInput{lines: newLines(r)}, nil
	case "jsonl":
		return &jsonInput{lines: newLines(r), key: key}, nil
	case "csv":
		return newCSVInput(r, key)
	}
	return nil, usagef("--format %q: must be lines, jsonl or csv", format)
}

// lines splits a stream; the last line needs no newline.
type lines struct {
	r    *bufio.Reader
	n    int
	long []byte
}

func newLines(r io.Reader) *lines { return &lines{r: bufio.NewReaderSize(r, 1<<16)} }

// next returns a line, every byte of it up to its "\n".
func (l *lines) next() ([]byte, error) {
	line, err := l.r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		l.long = append(l.long[:0], line...)
		for errors.Is(err, bufio.ErrBufferFull) {
			if len(l.long) > maxLine {
				return nil, &lineError{l.n + 1, fmt.Errorf("is longer than %d bytes", maxLine)}
			}
			line, err = l.r.ReadSlice('\n')
			l.long = append(l.long, line...)
		}
		line = l.long
	}
	if err != nil && (!errors.Is(err, io.EOF) || len(line) == 0) {
		return nil, err
	}
	l.n++
	return bytes.TrimSuffix(line, []byte("\n")), nil
}

// lineInput takes each line as a value, empty ones too.
type lineInput struct{ lines *lines }

func (in *lineInput) next() (inputRecord, error) {
	line, err := in.lines.next()
	if err != nil {
		return inputRecord{}, err
	}
	return inputRecord{line: in.lines.n, value: line}, nil
}

// jsonInput takes each line, one JSON object, as a value, and one of its fields
// as the key. Blank lines are skipped, and a byte order mark at the beginning.
type jsonInput struct {
	lines *lines
	key   string
}

func (in *jsonInput) next() (inputRecord, error) {
	for {
		line, err := in.lines.next()
		if err != nil {
			return inputRecord{}, err
		}
		line = bytes.TrimSuffix(line, []byte("\r"))
		if in.lines.n == 1 {
			line = bytes.TrimPrefix(line, []byte(byteOrderMark))
		}
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		rec := inputRecord{line: in.lines.n, value: line}
		if rec.key, err = jsonKey(line, in.key); err != nil {
			return inputRecord{}, &lineError{rec.line, err}
		}
		return rec, nil
	}
}

// jsonKey checks that line is one JSON object and takes the field out of it, nil
// for an empty name. A string is taken as it is, a number or truth value as it
// is written.
func jsonKey(line []byte, field string) ([]byte, error) {
	if field == "" {
		if !json.Valid(line) {
			return nil, jsonProblem(line)
		}
		if b := bytes.TrimSpace(line); b[0] != '{' {
			return nil, errors.New("is not a JSON object")
		}
		return nil, nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		return nil, jsonProblem(line)
	}
	if object == nil {
		return nil, errors.New("is not a JSON object")
	}
	raw, ok := object[field]
	if !ok {
		return nil, fmt.Errorf("has no field %q for the key", field)
	}
	switch raw[0] {
	case '"':
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, fmt.Errorf("field %q: %w", field, err)
		}
		return []byte(s), nil
	case '{', '[', 'n':
		return nil, fmt.Errorf("field %q can't be a key: it is %.40s, not a string, number or truth value", field, raw)
	}
	return raw, nil
}

func jsonProblem(line []byte) error {
	var v any
	err := json.Unmarshal(line, &v)
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Errorf("is not JSON: %w at byte %d", err, syntax.Offset)
	}
	return errors.New("is not a JSON object")
}

// csvInput takes each row as a JSON object of the columns that the first line
// names, in their order, all values as strings; and one column as the key.
type csvInput struct {
	r      *csv.Reader
	header []string
	column int // of the key, -1 for none
	buf    bytes.Buffer
}

func newCSVInput(r io.Reader, key string) (*csvInput, error) {
	in := &csvInput{r: csv.NewReader(&markless{r: bufio.NewReader(r)}), column: -1}
	in.r.ReuseRecord = true
	header, err := in.r.Read()
	if errors.Is(err, io.EOF) {
		return nil, &lineError{1, errors.New("there is no header: the first line must name the columns")}
	}
	if err != nil {
		return nil, csvProblem(err)
	}
	in.header = slices.Clone(header)
	for i, name := range in.header {
		if slices.Contains(in.header[:i], name) {
			return nil, &lineError{1, fmt.Errorf("names the column %q twice", name)}
		}
	}
	if key != "" {
		if in.column = slices.Index(in.header, key); in.column < 0 {
			return nil, &lineError{1, fmt.Errorf("has no column %q for the key, only %s", key, strings.Join(in.header, ", "))}
		}
	}
	return in, nil
}

func (in *csvInput) next() (inputRecord, error) {
	row, err := in.r.Read()
	if err != nil {
		return inputRecord{}, csvProblem(err)
	}
	line, _ := in.r.FieldPos(0)
	in.buf.Reset()
	for i, value := range row {
		sep := byte(',')
		if i == 0 {
			sep = '{'
		}
		in.buf.WriteByte(sep)
		for j, text := range []string{in.header[i], value} {
			if j == 1 {
				in.buf.WriteByte(':')
			}
			quoted, err := quoteJSON(text)
			if err != nil {
				return inputRecord{}, &lineError{line, fmt.Errorf("column %q: %w", in.header[i], err)}
			}
			in.buf.Write(quoted)
		}
	}
	in.buf.WriteByte('}')
	rec := inputRecord{line: line, value: in.buf.Bytes()}
	if in.column >= 0 {
		rec.key = []byte(row[in.column])
	}
	return rec, nil
}

// csvProblem names the line of an error of the csv package.
func csvProblem(err error) error {
	var parse *csv.ParseError
	if !errors.As(err, &parse) {
		return err
	}
	if errors.Is(parse.Err, csv.ErrFieldCount) {
		return &lineError{parse.Line, errors.New("has another number of fields than the header")}
	}
	return &lineError{parse.Line, fmt.Errorf("is not CSV: %w at column %d", parse.Err, parse.Column)}
}
