// The Go client as a peer of benchmarks/peer.py: the same work, the same output.
//
// go_peer MODE COUNT ADDRESS TOPIC [size=200] [topics=1] [connections=1] [handlers=1] [tls=0]
package main

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nsqio/go-nsq"
)

const (
	concurrent  = 64
	mixed       = 256
	batchSize   = 100
	batchBytes  = 4000000 // servers accept 5 MiB
	maxInFlight = 200
	channel     = "ch"
)

type work struct {
	mode        string
	count       int
	address     string
	topics      []string
	body        []byte
	connections int
	handlers    int
	tls         bool
	began       time.Time
	cpu         float64
}

func cpu() float64 {
	var usage syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func (w *work) begin() { w.began, w.cpu = time.Now(), cpu() }

func (w *work) done() {
	seconds, used := time.Since(w.began).Seconds(), cpu()-w.cpu
	count := float64(w.count)
	check(json.NewEncoder(os.Stdout).Encode(map[string]float64{"rate": count / seconds, "cpu": used / count * 1e6}))
	os.Exit(0)
}

func (w *work) config() *nsq.Config {
	config := nsq.NewConfig()
	if w.tls {
		config.TlsV1 = true
		config.TlsConfig = &tls.Config{InsecureSkipVerify: true}
	}
	return config
}

func (w *work) consume() {
	config := w.config()
	config.MaxInFlight = max(maxInFlight, w.handlers)
	consumer, err := nsq.NewConsumer(w.topics[0], channel, config)
	check(err)
	consumer.SetLoggerLevel(nsq.LogLevelError)
	var taken atomic.Int64
	consumer.AddConcurrentHandlers(nsq.HandlerFunc(func(*nsq.Message) error {
		switch taken.Add(1) {
		case 1:
			w.begin()
		case int64(w.count):
			w.done()
		}
		return nil
	}), w.handlers)
	check(consumer.ConnectToNSQD(w.address))
	select {}
}

func (w *work) publish() {
	producers := make([]*nsq.Producer, w.connections)
	for number := range producers {
		producer, err := nsq.NewProducer(w.address, w.config())
		check(err)
		producer.SetLoggerLevel(nsq.LogLevelError)
		for _, topic := range w.topics {
			check(producer.Publish(topic, w.body))
		}
		producers[number] = producer
	}
	w.begin()
	if w.mode == "mpub" {
		batch := make([][]byte, max(1, min(batchSize, batchBytes/len(w.body))))
		for number := range batch {
			batch[number] = w.body
		}
		for number := 0; number < w.count/len(batch); number++ {
			check(producers[0].MultiPublish(w.topics[0], batch))
		}
		w.done()
	}
	tasks := w.connections
	bodies := [][]byte{w.body}
	switch w.mode {
	case "pubc":
		tasks = concurrent
	case "mix":
		tasks = mixed
		bodies = [][]byte{w.body[:100], append(w.body, w.body...)}
	}
	var group sync.WaitGroup
	for task := 0; task < tasks; task++ {
		producer := producers[task%len(producers)]
		group.Add(1)
		go func() {
			defer group.Done()
			for number := 0; number < w.count/tasks; number++ {
				check(producer.Publish(w.topics[number%len(w.topics)], bodies[number%len(bodies)]))
			}
		}()
	}
	group.Wait()
	w.done()
}

func main() {
	numbers := map[string]int{"size": 200, "topics": 1, "connections": 1, "handlers": 1, "tls": 0, "threads": 1}
	for _, word := range os.Args[5:] {
		name, value, _ := strings.Cut(word, "=")
		number, err := strconv.Atoi(value)
		check(err)
		numbers[name] = number
	}
	count, err := strconv.Atoi(os.Args[2])
	check(err)
	w := &work{
		mode: os.Args[1], count: count, address: os.Args[3], body: bytes.Repeat([]byte("x"), numbers["size"]),
		topics: []string{os.Args[4]}, connections: numbers["connections"], handlers: numbers["handlers"],
		tls: numbers["tls"] == 1,
	}
	if numbers["topics"] > 1 {
		w.topics = nil
		for number := 0; number < numbers["topics"]; number++ {
			w.topics = append(w.topics, fmt.Sprintf("%s_%d", os.Args[4], number))
		}
	}
	if w.mode == "sub" {
		w.consume()
	}
	w.publish()
}
