module nsqext.example/go_peer_redesigned

go 1.21

require github.com/youzan/go-nsq v1.7.9-HA
