package main

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// readInput reads all records; a key is shown before its value as "key=value".
func readInput(t *testing.T, format, key, text string) (out []string, err error) {
	t.Helper()
	in, err := newInput(strings.NewReader(text), format, key)
	if err != nil {
		return nil, err
	}
	for {
		rec, err := in.next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		s := string(rec.value)
		if rec.key != nil {
			s = string(rec.key) + "=" + s
		}
		out = append(out, s)
	}
}

func TestInputs(t *testing.T) {
	long := strings.Repeat("x", 200_000)
	for _, row := range []struct {
		name, format, key, text string
		want                    []string
	}{
		{"lines", "lines", "", "a\nb\n", []string{"a", "b"}},
		{"no newline at the end", "lines", "", "a\nb", []string{"a", "b"}},
		{"empty lines are values", "lines", "", "a\n\nb\n", []string{"a", "", "b"}},
		{"a line is every byte up to the newline", "lines", "", "a\r\nb\r\n\r", []string{"a\r", "b\r", "\r"}},
		{"also a byte order mark", "lines", "", "\ufeffa\n", []string{"\ufeffa"}},
		{"spaces stay", "lines", "", " a \n", []string{" a "}},
		{"a long line", "lines", "", long + "\nb\n", []string{long, "b"}},
		{"nothing", "lines", "", "", nil},
		{"jsonl", "jsonl", "", `{"a":1}` + "\n" + `{ "b" : 2 }`, []string{`{"a":1}`, `{ "b" : 2 }`}},
		{"jsonl with carriage returns", "jsonl", "", "{}\r\n\r\n{}\r\n", []string{"{}", "{}"}},
		{"jsonl with a byte order mark", "jsonl", "k", "\ufeff{\"k\":\"v\"}\n", []string{`v={"k":"v"}`}},
		{"jsonl of a byte order mark", "jsonl", "", "\ufeff", nil},
		{"blank lines in between", "jsonl", "", "{}\n\n  \n{}\n", []string{"{}", "{}"}},
		{"a string as key", "jsonl", "k", `{"k":"x\u00e9\"","v":1}`, []string{`xé"={"k":"x\u00e9\"","v":1}`}},
		{"a number as key", "jsonl", "k", `{"k": 1.50 }`, []string{`1.50={"k": 1.50 }`}},
		{"a truth value as key", "jsonl", "k", `{"k":true}`, []string{`true={"k":true}`}},
		{"an empty key", "jsonl", "k", `{"k":""}`, []string{`={"k":""}`}},
		{"csv", "csv", "", "a,b\n1,2\n3,4\n", []string{`{"a":"1","b":"2"}`, `{"a":"3","b":"4"}`}},
		{"csv with a key", "csv", "b", "a,b\n1,2\n", []string{`2={"a":"1","b":"2"}`}},
		{"csv with quotes", "csv", "b", "a,b\n\"x, \"\"y\"\"\",\"k\nl\"\n", []string{"k\nl=" + `{"a":"x, \"y\"","b":"k\nl"}`}},
		{"csv with HTML", "csv", "", "a\n<b>&\n", []string{`{"a":"<b>&"}`}},
		{"csv with a byte order mark", "csv", "a", "\ufeffa,b\n1,2\n", []string{`1={"a":"1","b":"2"}`}},
		{"csv with a byte order mark before a quote", "csv", "a", "\ufeff\"a\",b\r\n1,2", []string{`1={"a":"1","b":"2"}`}},
		{"csv with a header only", "csv", "", "a,b\n", nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := readInput(t, row.format, row.key, row.text)
			require.NoError(t, err)
			require.Equal(t, row.want, got)
		})
	}
}

func TestMalformedLinesAreNamedByTheirNumber(t *testing.T) {
	for _, row := range []struct {
		name, format, key, text string
		before                  int
		want                    string
	}{
		{"not JSON", "jsonl", "", "{}\n{\"a\":}\n{}\n", 1, "line 2: is not JSON: invalid character '}'"},
		{"blank lines count", "jsonl", "k", "\n\n{}\n", 0, `line 3: has no field "k"`},
		{"not an object", "jsonl", "", "[1]\n", 0, "line 1: is not a JSON object"},
		{"null", "jsonl", "k", "null\n", 0, "line 1: is not a JSON object"},
		{"two values", "jsonl", "", "{} {}\n", 0, "line 1: is not JSON"},
		{"an object as key", "jsonl", "k", `{"k":{"x":1}}`, 0, `line 1: field "k" can't be a key`},
		{"a byte order mark further on", "jsonl", "", "{}\n\ufeff{}\n", 1, "line 2: is not JSON"},
		{"null as key", "jsonl", "k", `{"k":null}`, 0, `line 1: field "k" can't be a key`},
		{"too few fields", "csv", "", "a,b\n1,2\n3\n", 1, "line 3: has another number of fields"},
		{"too many fields", "csv", "", "a\n1,2\n", 0, "line 2: has another number of fields"},
		{"a quote inside", "csv", "", "a,b\n1,x\"y\n", 0, "line 2: is not CSV"},
		{"an open quote", "csv", "", "a,b\n1,2\n\"3,4\n5,6\n", 1, "is not CSV"},
		{"a line after a record of two lines", "csv", "", "a,b\n\"1\n1\",2\n3\n", 1, "line 4: has another number of fields"},
		{"no header", "csv", "", "", 0, "line 1: there is no header"},
		{"no such column", "csv", "c", "a,b\n", 0, `line 1: has no column "c" for the key, only a, b`},
		{"a column twice", "csv", "", "a,a\n", 0, `line 1: names the column "a" twice`},
		{"not UTF-8", "csv", "", "a\n\xff\n", 0, `line 2: column "a": is not UTF-8`},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := readInput(t, row.format, row.key, row.text)
			var bad *lineError
			require.ErrorAs(t, err, &bad)
			require.ErrorContains(t, err, row.want)
			require.Len(t, got, row.before)
		})
	}
	_, err := newInput(strings.NewReader(""), "lines", "k")
	require.ErrorContains(t, err, "a line has no fields")
}

func TestTheEmbeddedEarthquakesAreTheTestData(t *testing.T) {
	data, err := os.ReadFile("../../testdata/earthquakes.jsonl")
	require.NoError(t, err)
	require.Equal(t, string(data), string(earthquakes))
	records, err := demoRecords(earthquakes, "net")
	require.NoError(t, err)
	require.Len(t, records, 1707)
}
