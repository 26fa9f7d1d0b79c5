// The Go client of the redesigned NSQ as a peer of benchmarks/bench_ordered.py: the same work, the same output.
//
// go_peer_redesigned MODE COUNT LOOKUPD TOPIC
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spaolacci/murmur3"
	"github.com/youzan/go-nsq"
)

const (
	concurrent = 64
	channel    = "ch"
	warmUp     = 200
)

var (
	began time.Time
	used  float64
	body  = bytes.Repeat([]byte("x"), 200)
)

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

func begin() { began, used = time.Now(), cpu() }

func done(count int) {
	seconds, spent := time.Since(began).Seconds(), cpu()-used
	each := spent / float64(count) * 1e6
	check(json.NewEncoder(os.Stdout).Encode(map[string]float64{"rate": float64(count) / seconds, "cpu": each}))
	os.Exit(0)
}

func consume(lookupd, topic string, count int) {
	config := nsq.NewConfig()
	config.EnableOrdered = true
	config.MaxInFlight = 200
	consumer, err := nsq.NewConsumer(topic, channel, config)
	check(err)
	consumer.SetLogger(log.New(os.Stderr, "", 0), nsq.LogLevelError)
	var taken atomic.Int64
	consumer.AddHandler(nsq.HandlerFunc(func(*nsq.Message) error {
		switch taken.Add(1) {
		case warmUp:
			begin()
		case int64(count):
			done(count - warmUp)
		}
		return nil
	}))
	check(consumer.ConnectToNSQLookupd(lookupd))
	select {}
}

func publish(mode, lookupd, topic string, count int) {
	config := nsq.NewConfig()
	config.Hasher = murmur3.New32()
	producer, err := nsq.NewTopicProducerMgr([]string{topic}, config)
	check(err)
	producer.SetLogger(log.New(os.Stderr, "", 0), nsq.LogLevelError)
	producer.AddLookupdNodes([]string{lookupd})
	one := func(number int) {
		key := []byte("key")
		if mode == "keys" || mode == "keysext" {
			key = []byte(fmt.Sprintf("key-%d", number%1000))
		}
		var err error
		if mode == "keysext" || mode == "onekeyext" {
			ext := &nsq.MsgExt{TraceID: uint64(number + 1), Custom: map[string]interface{}{"name": "value"}}
			_, _, _, err = producer.PublishOrderedWithJsonExt(topic, key, body, ext)
		} else {
			_, _, _, err = producer.PublishOrdered(topic, key, body)
		}
		check(err)
	}
	for number := 0; number < warmUp; number++ {
		one(number)
	}
	begin()
	var group sync.WaitGroup
	for task := 0; task < concurrent; task++ {
		group.Add(1)
		go func(task int) {
			defer group.Done()
			for number := task; number < count; number += concurrent {
				one(number)
			}
		}(task)
	}
	group.Wait()
	done(count)
}

func main() {
	mode, lookupd, topic := os.Args[1], os.Args[3], os.Args[4]
	count, err := strconv.Atoi(os.Args[2])
	check(err)
	if mode == "ordered" {
		consume(lookupd, topic, count)
	}
	publish(mode, lookupd, topic, count)
}
